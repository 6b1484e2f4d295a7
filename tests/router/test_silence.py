"""A replica whose frames stop gets no new prompts, then gives away what it has, and is used again when it speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from serve_app.core.errors import ReplicaLost
from serve_app.core.prompt import Tokenization, TokenizeRequest
from serve_app.core.request import GenerationRequest
from serve_app.router.fleet import Fleet
from serve_app.router.inquiries import Inquiries
from serve_app.router.link import QUIET_LOOKS, SILENT_LOOKS
from serve_app.router.router import Router
from tests.fakes import FakeBackend
from tests.router.test_run import add, collected, fleet, make_backend, make_request, settle, settle_until  # noqa: F401


def look(fleet: Fleet, num_looks: int, *speaking: FakeBackend) -> None:  # noqa: F811
    """So often, while these replicas send their heartbeats."""
    for _ in range(num_looks):
        fleet.look()
    for backend in speaking:
        backend.send(fleet.router_id)


async def silence(fleet: Fleet, *speaking: FakeBackend, num_looks: int = SILENT_LOOKS) -> None:  # noqa: F811
    """Of all replicas but these."""
    for _ in range(num_looks + 1):
        look(fleet, 1, *speaking)
        await settle(5)


def placed_on(fleet: Fleet) -> list[str]:  # noqa: F811
    return sorted(link.replica_id for link in fleet.links_for(fleet.resolve("tiny")))


async def test_a_quiet_replica_gets_nothing_that_another_one_can_take_until_it_speaks(fleet):  # noqa: F811
    quiet, other = make_backend("r0"), make_backend("r1")
    add(fleet, quiet, other)
    await settle()
    await silence(fleet, other, num_looks=QUIET_LOOKS - 1)
    assert placed_on(fleet) == ["r0", "r1"]
    await silence(fleet, other, num_looks=1)
    assert placed_on(fleet) == ["r1"]
    assert [link.replica_id for link in fleet.links_of("tiny")] == ["r1"]
    await silence(fleet)
    assert placed_on(fleet) == ["r0", "r1"], "where all are quiet, the router may be the one that hears nothing"
    quiet.send(fleet.router_id)
    await settle()
    assert placed_on(fleet) == ["r0"]


async def test_what_a_silent_replica_computes_goes_on_elsewhere_and_is_ended_when_it_is_back(fleet):  # noqa: F811
    silent, other = make_backend("r0", is_stepped=True), make_backend("r1", is_stepped=True)
    add(fleet, silent)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(max_tokens=4, stream=True))))
    await settle_until(lambda: silent.num_live == 1)
    silent.step()
    await settle()
    await silence(fleet)
    assert silent.num_live == 1, "nobody else is there: it may come back"
    silent.abort = unheard
    add(fleet, other)
    await settle()
    fleet.look()
    await settle_until(lambda: other.num_live == 1)
    for _ in range(3):
        other.step()
    assert await asyncio.wait_for(reading, 60) == [" p0s0w0 p0s0w1 p0s0w2 p0s0w3"]
    assert silent.num_live == 1, "it heard nothing of that"
    del silent.abort
    silent.step()
    await settle_until(lambda: silent.num_live == 0)


async def unheard(router_id: str, request_ids: Sequence[str]) -> None:
    raise ConnectionError("no route")


async def test_a_request_whose_submission_is_never_answered_goes_on_without_that_answer(fleet):  # noqa: F811
    silent, other = make_backend("r0"), make_backend("r1", is_stepped=True)
    silent.submit_gate.clear()
    add(fleet, silent)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(max_tokens=1))))
    await settle()
    add(fleet, other)
    await silence(fleet, other)
    await settle_until(lambda: other.num_live == 1)
    other.step()
    assert await asyncio.wait_for(reading, 60) == [" p0s0w0"]
    silent.submit_gate.set()
    await settle_until(lambda: len(silent.aborted) == 1)


async def test_a_router_that_stood_still_gives_nobody_up(fleet):  # noqa: F811
    """It looks once behind a pause, however long that was."""
    backend, other = make_backend("r0", is_stepped=True), make_backend("r1")
    add(fleet, backend)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(max_tokens=1, stream=True))))
    await settle_until(lambda: backend.num_live == 1)
    add(fleet, other)
    await silence(fleet, backend, other, num_looks=2 * SILENT_LOOKS)
    look(fleet, 1)
    assert placed_on(fleet) == ["r0", "r1"]
    backend.step()
    assert await asyncio.wait_for(reading, 60) == [" p0s0w0"]
    assert other.submissions == []


async def test_a_stream_that_is_silent_though_its_replica_answers_is_opened_anew(fleet):  # noqa: F811
    backend = make_backend("r0", is_stepped=True)
    add(fleet, backend)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(max_tokens=2, stream=True))))
    await settle_until(lambda: backend.num_live == 1)
    backend.step()
    await settle()
    (link,) = fleet.links_of()
    await silence(fleet)
    add(fleet, backend)
    add(fleet, backend)
    assert fleet.links_for(fleet.resolve("tiny")) == [link]
    add(fleet, backend)
    assert fleet.links_of() not in ([], [link])
    await settle_until(lambda: len(backend.submissions) == 2)
    backend.step()
    assert await asyncio.wait_for(reading, 60) == [" p0s0w0 p0s0w1"]


class Deaf(FakeBackend):
    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        await asyncio.Event().wait()
        raise AssertionError

    async def submit(self, router_id: str, requests: Sequence[GenerationRequest]) -> bool:
        return await asyncio.Event().wait()


async def test_a_question_to_a_silent_replica_is_asked_of_another_one(fleet):  # noqa: F811
    backend, other = Deaf(make_backend("r0").card), make_backend("r1")
    add(fleet, backend, other)
    asking = asyncio.create_task(Inquiries(fleet.seen_with(Router(fleet).view.rights)).tokenize("tiny", text("ab")))
    await settle()
    assert not asking.done()
    await silence(fleet, other)
    assert (await asyncio.wait_for(asking, 60)).token_ids == (97, 98)


async def test_a_question_that_is_given_up_before_it_is_asked_is_refused_as_others_are(fleet):  # noqa: F811
    add(fleet, Deaf(make_backend("r0").card))
    await settle()
    await silence(fleet)
    asking = asyncio.create_task(Inquiries(fleet.seen_with(Router(fleet).view.rights)).tokenize("tiny", text("ab")))
    asyncio.get_running_loop().call_soon(fleet.look)
    with pytest.raises(ReplicaLost):
        await asyncio.wait_for(asking, 60)


def text(characters: str) -> TokenizeRequest:
    return TokenizeRequest(text=characters, adds_special=False)


@pytest.mark.parametrize("has_other", [True, False])
async def test_what_waits_at_a_replica_that_is_lost_while_it_is_silent_is_told_once(fleet, has_other):  # noqa: F811
    silent, other = make_backend("r0", is_stepped=True), make_backend("r1")
    add(fleet, silent)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(max_tokens=2, stream=True))))
    await settle_until(lambda: silent.num_live == 1)
    silent.step()
    await settle()
    await silence(fleet)
    if has_other:
        add(fleet, other)
        fleet.look()
        await settle()
    silent.die(ConnectionResetError("no route"))
    await settle()
    if not has_other:
        add(fleet, other)
    assert await asyncio.wait_for(reading, 60) == [" p0s0w0 p0s0w1"]
