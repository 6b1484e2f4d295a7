"""An inbox keeps order, asks for a pause once, and for more only when there is room again."""

from __future__ import annotations

import asyncio

from serve_app.core.delta import Delta
from serve_app.router.inbox import Event, Inbox


def event(number: int, part: int = 0) -> Event:
    return Event(index=number, part=part, delta=Delta(request_id="a", sample=0))


def make_inbox(max_pending: int | None) -> tuple[Inbox, list[str]]:
    calls: list[str] = []
    return Inbox(max_pending, on_full=lambda: calls.append("full"), on_slack=lambda: calls.append("slack")), calls


async def test_a_pause_is_asked_for_once_and_ended_at_half_of_the_bound() -> None:
    inbox, calls = make_inbox(4)
    for number in range(8):
        inbox.put(event(number))
    assert (calls, inbox.is_full) == (["full"], True)
    taken = [await inbox.take() for _ in range(5)]
    assert calls == ["full"]
    taken.append(await inbox.take())
    assert calls == ["full", "slack"]
    assert [each.index for each in taken if isinstance(each, Event)] == list(range(6))


async def test_without_a_bound_nothing_is_asked_for() -> None:
    inbox, calls = make_inbox(None)
    for number in range(10_000):
        inbox.put(event(number))
    assert calls == []


async def test_a_reader_cancelled_while_it_waits_has_taken_nothing() -> None:
    inbox, _ = make_inbox(None)
    reader = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.put(event(7))
    reader.cancel()
    await asyncio.wait([reader])
    taken = await inbox.take()
    assert isinstance(taken, Event)
    assert taken.index == 7
