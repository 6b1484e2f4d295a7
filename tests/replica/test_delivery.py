"""What steps gave reaches the routers it is for, and what fails for one of them concerns no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest

from serve_app.core.delta import Delta, Load
from serve_app.core.errors import EngineFailed
from serve_app.core.ledger import Spent
from serve_app.replica.delivery import Delivery, Outbox
from serve_app.replica.requests import OpenRequests
from tests.engine.harness import request


class BrokenOutbox(Outbox):
    """Takes nothing."""

    def put(self, deltas: object, load: object) -> None:
        raise RuntimeError("it was told to fail")


@dataclass(slots=True)
class Desk:
    """A delivery with what it works on. `ended`: requests that were ended in the engine, in their order"""

    make_outbox: Callable[[], Outbox] = lambda: Outbox(8)
    requests: OpenRequests = field(default_factory=lambda: OpenRequests(100, lambda: 0.0))
    ended: list[frozenset[str]] = field(default_factory=list)
    delivery: Delivery = field(init=False)

    def __post_init__(self) -> None:
        self.delivery = Delivery(
            self.requests, end=self.end, make_outbox=lambda: self.make_outbox(), max_outbox_bytes=20_000
        )

    def end(self, request_ids: frozenset[str]) -> None:
        self.requests.drop(request_ids)
        self.ended.append(request_ids)

    def take(self, router_id: str, name: str, n: int = 1) -> None:
        self.delivery.expect(router_id)
        self.requests.add(router_id, [replace(request(name), n=n, client_request_id=f"client-{name}")])

    async def read(self, router_id: str) -> list[Delta]:
        """All that waits for the router."""
        frames = self.delivery.frames(router_id)
        async with asyncio.timeout(60):
            frame = await anext(frames)
        await frames.aclose()
        return list(frame.deltas)


def delta(name: str, text: str = "x", sample: int = 0) -> Delta:
    return Delta(request_id=name, sample=sample, text=text)


async def test_each_router_is_sent_its_own_deltas_with_the_load() -> None:
    desk = Desk()
    desk.take("first", "a")
    desk.take("second", "b")
    desk.delivery.deliver([delta("a"), delta("b", "y"), delta("gone")], Load(num_running=2))
    assert await desk.read("second") == [delta("b", "y")]
    frames = desk.delivery.frames("first")
    frame = await anext(frames)
    assert (list(frame.deltas), frame.load.num_running) == ([delta("a")], 2)
    await frames.aclose()


async def test_what_was_spent_reaches_all_routers_where_nobody_has_a_delta_to_be_told_with() -> None:
    desk = Desk()
    desk.take("first", "a")
    desk.take("second", "b")
    spent = (Spent(flow="f", completion_tokens=3),)
    desk.delivery.deliver([delta("gone")], Load(num_running=2, spent=spent))
    for router_id in ("first", "second"):
        async with asyncio.timeout(60), aclosing(desk.delivery.frames(router_id)) as frames:
            frame = await anext(frames)
            assert (frame.deltas, frame.load.num_running, frame.load.spent) == ((), 2, spent)


async def test_what_cannot_be_sent_to_one_router_reaches_the_others_and_no_capacity_leaks() -> None:
    desk = Desk(make_outbox=lambda: BrokenOutbox(1))
    desk.take("broken", "a")
    desk.make_outbox = lambda: Outbox(8)
    desk.take("sound", "b")
    desk.delivery.deliver([delta("a"), delta("b")], Load())
    assert desk.ended == [frozenset({"a"})]
    assert "broken" not in desk.delivery
    assert await desk.read("sound") == [delta("b")]


async def test_what_a_router_leaves_unread_beyond_the_bound_becomes_one_error_per_sequence() -> None:
    desk = Desk()
    desk.take("deaf", "a", n=2)
    desk.take("deaf", "b")
    desk.take("other", "c")
    desk.delivery.deliver([delta("a", "x" * 20_000), delta("c")], Load())
    assert desk.ended == [frozenset({"a", "b"})]
    lost = await desk.read("deaf")
    assert [(each.request_id, each.sample) for each in lost] == [("a", 0), ("a", 1), ("b", 0)]
    assert all(isinstance(each.error, EngineFailed) and "did not read" in str(each.error) for each in lost)
    assert "c" in desk.requests


async def test_closing_a_stream_ends_what_the_router_had_and_a_second_stream_takes_the_place_of_the_first() -> None:
    desk = Desk()
    first = desk.delivery.frames("router")
    waiting = asyncio.ensure_future(anext(first, None))
    await asyncio.sleep(0)
    desk.take("router", "a")
    second = desk.delivery.frames("router")
    also_waiting = asyncio.ensure_future(anext(second, None))
    async with asyncio.timeout(60):
        assert await waiting is None
    assert desk.ended == [frozenset({"a"})]
    desk.take("router", "b")
    desk.delivery.deliver([delta("b")], Load())
    assert await also_waiting is not None
    await second.aclose()
    assert desk.ended[-1] == frozenset({"b"})
    assert "router" not in desk.delivery


def named(caplog: pytest.LogCaptureFixture) -> list[tuple[int, tuple[str, ...]]]:
    """Level of each line, and the requests that it is about."""
    return [(each.levelno, getattr(each, "request_ids", ())) for each in caplog.records]


async def test_lines_about_a_router_name_the_requests_that_end_with_it(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(make_outbox=lambda: BrokenOutbox(1))
    desk.take("broken", "a")
    desk.take("broken", "b")
    desk.make_outbox = lambda: Outbox(8)
    desk.take("deaf", "c")
    desk.take("silent", "d")
    desk.delivery.deliver([delta("a"), delta("c", "x" * 20_000)], Load())
    desk.delivery.give_up("silent", "was not heard of for 10 s")
    assert named(caplog) == [
        (logging.ERROR, ("client-a", "client-b")),
        (logging.ERROR, ("client-c",)),
        (logging.WARNING, ("client-d",)),
    ]
    assert [bool(each.exc_info) for each in caplog.records] == [True, False, False]
    assert "silent" not in desk.delivery
