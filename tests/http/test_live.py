"""GET /live: once, or as events to so many listeners, who leave nothing behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.types import Message

from serve_app.core.cards import Scale
from serve_app.core.errors import Overloaded, Unauthenticated, Unavailable
from serve_app.core.tenants import LOCAL
from serve_app.http.app import build_app
from serve_app.http.live import MAX_EVENTS, MAX_LISTENERS, Live
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card


class Listener:
    """Reads events one by one, and leaves when it likes; it counts as having read what it took."""

    def __init__(self, live: Live, *, accept: bytes = b"text/event-stream", **scope: Any) -> None:
        self.events: asyncio.Queue[Message] = asyncio.Queue()
        self.leaves = asyncio.Event()
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "GET",
            "headers": [(b"accept", accept)],
            "state": {"admit_again": lambda: None},
            **scope,
        }
        self.task = asyncio.create_task(live(self.scope, self._receive, self.events.put))

    async def _receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def next_body(self) -> bytes:
        async with asyncio.timeout(60):
            while (message := await self.events.get())["type"] == "http.response.start":
                assert message["status"] == 200
        body: bytes = message["body"]
        return body


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    fleet = Fleet("router-7")
    backend = FakeBackend(replica_card("r0", model_card("tiny", adapter_card("sql"))), is_stepped=True)
    fleet.put(backend.card, backend)
    fleet.expect(["tiny", "big"], (), {"tiny": Scale(wanted=3, starting=1, draining=2)})
    yield Router(fleet)
    await fleet.close()


async def test_it_tells_of_replicas_and_queues_as_it_is_described(router: Router) -> None:
    transport = httpx.ASGITransport(build_app(router))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        ticket = router.admission.enter()
        answered = await client.get("/live")
        ticket.give_back()
        document = (await client.get("/openapi.json")).json()
    schema = document["components"]["schemas"]["Live"]
    found = answered.json()
    jsonschema.validate(found, schema)
    assert set(found["replicas"][0]) == set(schema["properties"]["replicas"]["items"]["required"])
    assert (found["router"], found["loading"], found["requests"]["open"]) == ("router-7", ["big"], 1)
    assert [(each["id"], each["model"], each["blocks"]) for each in found["replicas"]] == [("r0", "tiny", 100)]
    assert found["scales"] == [{"id": "tiny", "wanted": 3, "starting": 1, "draining": 2}]
    assert answered.headers["cache-control"] == "no-store"


async def test_events_follow_what_happens_until_the_listener_leaves(router: Router) -> None:
    live = Live(router.fleet, router.admission, period_s=0.001)
    listener = Listener(live)
    first = json.loads((await listener.next_body()).removeprefix(b"data: "))
    ticket = router.admission.enter()
    while json.loads((await listener.next_body()).removeprefix(b"data: "))["requests"]["open"] != 1:
        pass
    ticket.give_back()
    assert (first["requests"]["open"], live.num_listeners) == (0, 1)
    listener.leaves.set()
    await listener.task
    assert (live.num_listeners, listener.scope["state"]["served"].status) == (0, 499)


async def test_no_more_listen_than_may_and_all_of_them_share_what_is_written(router: Router) -> None:
    live = Live(router.fleet, router.admission, period_s=60, clock=lambda: 1.0)
    listeners = [Listener(live) for _ in range(MAX_LISTENERS)]
    bodies = {await each.next_body() for each in listeners}
    assert (len(bodies), live.num_written, live.num_listeners) == (1, 1, MAX_LISTENERS)
    with pytest.raises(Overloaded) as refused:
        await Listener(live).task
    assert refused.value.retry_after_s == 5
    listeners[0].leaves.set()
    await listeners[0].task
    assert await Listener(live).next_body() in bodies
    for each in asyncio.all_tasks() - {asyncio.current_task()}:
        each.cancel()


@pytest.mark.parametrize("scope", [{"accept": b"*/*"}, {"http_version": "1.0"}, {"method": "HEAD"}])
async def test_who_can_take_no_events_is_told_once_and_takes_no_place(router: Router, scope: dict[str, Any]) -> None:
    live = Live(router.fleet, router.admission)
    listener = Listener(live, **scope)
    assert json.loads(await listener.next_body())["object"] == "live"
    await listener.task
    assert live.num_written == 0


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_a_stream_ends_with_the_router_and_after_so_many_events(router: Router, is_stopped: bool) -> None:
    live = Live(router.fleet, router.admission, period_s=0.0)
    listener = Listener(live)
    if is_stopped:
        router.admission.stop(Unavailable("stopped"))
    await listener.task
    bodies = [message["body"] for message in listener.events._queue if "body" in message]  # type: ignore[attr-defined]
    assert len(bodies) == (1 if is_stopped else MAX_EVENTS) + 1
    assert (bodies[-1], live.num_listeners) == (b"", 0)


async def test_a_stream_whose_key_was_revoked_ends_with_an_error(router: Router) -> None:
    keys = iter([LOCAL])

    def admit_again() -> object:
        if (identity := next(keys, None)) is None:
            raise Unauthenticated("revoked")
        return identity

    listener = Listener(Live(router.fleet, router.admission, period_s=0.0), state={"admit_again": admit_again})
    bodies = [await listener.next_body() for _ in range(3)]
    assert [b"invalid_api_key" in body for body in bodies] == [False, False, True]
    await listener.task


async def test_a_listener_that_reads_nothing_is_given_up(router: Router) -> None:
    live = Live(router.fleet, router.admission, max_stall_s=0.01)
    stalled = asyncio.Event()

    async def never_read(message: Message) -> None:
        await stalled.wait()

    async def stay() -> Message:
        await stalled.wait()
        return {"type": "http.disconnect"}

    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "headers": [(b"accept", b"text/event-stream")],
        "state": {"admit_again": lambda: None},
    }
    await live(scope, stay, never_read)
    assert live.num_listeners == 0
