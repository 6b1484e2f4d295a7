"""A run brings every choice to one end, and leaves nothing behind however it is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Literal

import pytest

from serve_app.api.completion import CompletionRequest
from serve_app.core.delta import Delta, FinishReason, Usage
from serve_app.core.errors import (
    AdapterNotFound,
    AdapterUnusable,
    DeadlineExceeded,
    EngineFailed,
    ModelLoading,
    ModelNotFound,
    Overloaded,
    ReplicaLost,
)
from serve_app.core.request import GenerationRequest
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router, RouterConfig
from serve_app.router.run import Run, RunSettings
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card, settle
from tests.parsing import parse_completion


def make_request(**members: object) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "tiny", "prompt": "Hello", **members}).encode())


def make_backend(replica_id: str, **options: bool) -> FakeBackend:
    return FakeBackend(replica_card(replica_id, model_card("tiny", adapter_card("sql"))), **options)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet("router-0")
    yield fleet
    await fleet.close()


def add(fleet: Fleet, *backends: FakeBackend) -> None:
    for backend in backends:
        fleet.put(backend.card, backend)


async def exhaust(run: Run, *, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Read a run to its end; `meanwhile` happens once it has started."""
    async with run:
        meanwhile()
        async for _ in run:
            pass


def outstanding(fleet: Fleet) -> int:
    return sum(link.num_outstanding for link in fleet.links_for(fleet.resolve("tiny")))


@pytest.mark.law("One ending")
async def test_every_choice_has_its_index_its_order_and_one_end(fleet):
    add(fleet, make_backend("r0"), make_backend("r1"))
    texts = [""] * 6
    ends = [0] * 6
    async with Router(fleet).open(make_request(prompt=["a", "b", "c"], n=2, max_tokens=3)) as run:
        async for event in run:
            assert ends[event.index] == 0
            texts[event.index] += event.delta.text
            ends[event.index] += event.delta.finish is not None
    assert texts == ["".join(f" p{i // 2}s{i % 2}w{w}" for w in range(3)) for i in range(6)]
    assert ends == [1] * 6
    assert run.stats.finish_reasons == {FinishReason.LENGTH: 6}


async def test_usage_counts_each_prompt_once_and_every_completion(fleet):
    add(fleet, make_backend("r0"))
    request = make_request(prompt=["one two", "three"], n=3, max_tokens=4)
    async with Router(fleet).open(request) as run:
        async for _ in run:
            pass
    assert run.stats.usage == Usage(prompt_tokens=3, completion_tokens=24, cached_tokens=1)


async def test_prompts_are_spread_and_each_replica_gets_one_submission(fleet):
    first, second = make_backend("r0"), make_backend("r1")
    add(fleet, first, second)
    await exhaust(Router(fleet).open(make_request(prompt=["x"] * 16)))
    assert [len(backend.submissions) for backend in (first, second)] == [1, 1]
    assert [len(backend.submissions[0]) for backend in (first, second)] == [8, 8]


async def test_requests_side_by_side_are_spread_by_the_work_outstanding(fleet):
    first, second = make_backend("r0", is_stepped=True), make_backend("r1", is_stepped=True)
    add(fleet, first, second)
    router = Router(fleet)
    async with router.open(make_request(n=3)), router.open(make_request()), router.open(make_request()):
        assert sorted([first.num_live, second.num_live]) == [2, 3]


async def test_prompts_of_one_request_may_name_different_adapters(fleet):
    add(fleet, make_backend("r0"))
    texts = ["", ""]
    request = make_request(prompt=["a", "b"], lora_path=["sql", None], max_tokens=1)
    async with Router(fleet).open(request) as run:
        async for event in run:
            texts[event.index] += event.delta.text
    assert texts == [" sql-p0s0w0", " p1s0w0"]


async def test_an_unknown_model_is_refused_before_anything_is_submitted(fleet):
    backend = make_backend("r0")
    add(fleet, backend)
    with pytest.raises(ModelNotFound):
        Router(fleet).open(make_request(model="nobody"))
    assert backend.submissions == []


async def test_one_refusal_refuses_all_and_aborts_what_was_accepted(fleet):
    willing, full = make_backend("r0", is_stepped=True), make_backend("r1")
    full.refusal = Overloaded("full", None, {"retry_after_s": 2})
    add(fleet, willing, full)
    with pytest.raises(Overloaded):
        async with Router(fleet).open(make_request(prompt=["a", "b"])):
            pytest.fail("the run was entered")
    await settle()
    assert willing.num_live == 0
    assert len(willing.aborted) == 1
    assert outstanding(fleet) == 0


async def test_leaving_early_aborts_what_has_not_ended(fleet):
    backend = make_backend("r0", is_stepped=True)
    add(fleet, backend)
    async with Router(fleet).open(make_request(prompt=["a", "b"], stream=True)) as run:
        backend.step()
        await anext(run)
    await settle()
    assert sorted(backend.aborted) == [f"{run.response_id}/{i}" for i in range(2)]
    assert (backend.num_live, outstanding(fleet)) == (0, 0)


async def test_nothing_is_aborted_that_has_ended(fleet):
    backend = make_backend("r0")
    add(fleet, backend)
    async with Router(fleet).open(make_request(prompt=["a", "b"], max_tokens=2)) as run:
        async for _ in run:
            pass
    await settle()
    assert backend.aborted == []
    assert outstanding(fleet) == 0


async def test_a_cancelled_reader_aborts_its_sequences(fleet):
    backend = make_backend("r0", is_stepped=True)
    add(fleet, backend)

    async def read() -> None:
        async with Router(fleet).open(make_request(n=2)) as run:
            async for _ in run:
                pass

    reader = asyncio.ensure_future(read())
    await settle()
    assert backend.num_live == 2
    reader.cancel()
    await settle()
    assert reader.cancelled()
    assert (backend.num_live, outstanding(fleet)) == (0, 0)


async def test_a_reader_cancelled_while_it_submits_leaves_nothing_running(fleet):
    backend = make_backend("r0", is_stepped=True)
    backend.submit_gate.clear()
    add(fleet, backend)

    async def enter() -> None:
        async with Router(fleet).open(make_request()):
            pytest.fail("the run was entered")

    reader = asyncio.ensure_future(enter())
    await settle()
    reader.cancel()
    await settle()
    assert reader.cancelled()
    backend.submit_gate.set()
    await settle()
    assert len(backend.submissions) == 1, "the submission was on its way and arrives"
    assert backend.num_live == 0


async def collected(run: Run) -> list[str]:
    """The texts of all choices, read to the end."""
    texts = [""] * sum(request.n for request in run.requests)
    async with run:
        async for event in run:
            texts[event.index] += event.delta.text
    return texts


async def settle_until(holds: Callable[[], bool]) -> None:
    for _ in range(200):
        if holds():
            return
        await asyncio.sleep(0)
    pytest.fail("it never came to hold")


async def test_a_whole_answer_survives_the_loss_of_its_replica_and_nothing_is_computed_twice_elsewhere(fleet):
    dying, other = make_backend("r0", is_stepped=True), make_backend("r1", is_stepped=True)
    add(fleet, dying, other)
    run = Router(fleet).open(make_request(prompt=["a", "b"], n=2, max_tokens=3))
    reading = asyncio.create_task(collected(run))
    await settle_until(lambda: dying.num_live == other.num_live == 2)
    dying.step()
    other.step()
    await settle()
    moved = dying.submissions[0][0]
    dying.die(ConnectionResetError("gone"))
    await settle_until(lambda: other.num_live == 4)
    for _ in range(3):
        other.step()
    texts = await asyncio.wait_for(reading, 60)
    assert texts == [f" p{i // 2}s{i % 2}w0 p{i // 2}s{i % 2}w1 p{i // 2}s{i % 2}w2" for i in range(4)]
    assert [len(share) for share in other.submissions] == [1, 1], "only the prompt that was lost was given again"
    assert other.submissions[1][0].prompt_index == moved.prompt_index
    assert other.submissions[1][0].request_id != moved.request_id, "what comes late is not taken for news"
    assert run.stats.usage == Usage(prompt_tokens=2, completion_tokens=12)
    assert (run.stats.num_generated, run.stats.num_moves) == (12, 1), "nothing is generated twice"
    assert [len(each.token_ids) for each in other.submissions[1][0].continued if each] == [1, 1]
    assert outstanding(fleet) == 0


async def test_prompts_lost_together_are_given_on_together(fleet):
    dying, other = make_backend("r0", is_stepped=True), make_backend("r1", is_stepped=True)
    add(fleet, dying, other)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(prompt=["x"] * 8, max_tokens=1))))
    await settle_until(lambda: dying.num_live == other.num_live == 4)
    dying.die(None)
    await settle_until(lambda: other.num_live == 8)
    other.step()
    await asyncio.wait_for(reading, 60)
    assert [len(share) for share in other.submissions] == [4, 4]


async def test_a_prompt_is_moved_only_so_often(fleet):
    backends = [make_backend(f"r{i}", is_stepped=True) for i in range(5)]
    add(fleet, *backends)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request())))
    for _ in range(3):
        await settle_until(lambda: any(backend.num_live for backend in backends))
        next(backend for backend in backends if backend.num_live).die(ConnectionResetError("gone"))
    with pytest.raises(ReplicaLost):
        await asyncio.wait_for(reading, 60)
    assert sum(len(backend.submissions) for backend in backends) == 3


async def test_a_lost_request_without_another_replica_is_told_to_come_again(fleet):
    backend = make_backend("r0", is_stepped=True)
    add(fleet, backend)
    with pytest.raises(ModelLoading) as caught:
        await exhaust(Router(fleet).open(make_request()), meanwhile=lambda: backend.die(ConnectionResetError("gone")))
    assert caught.value.retry_after_s


async def test_an_adapter_that_is_withdrawn_on_a_requests_way_is_not_found(fleet):
    backend = make_backend("r0")
    add(fleet, backend)
    run = Router(fleet).open(make_request(model="tiny:sql"))
    fleet.update("r0", replace(backend.card.model, adapters=(adapter_card("other", "v1"),)))
    with pytest.raises(AdapterNotFound):
        await exhaust(run)


async def test_prompts_of_a_replica_that_is_lost_before_it_accepts_go_to_another(fleet):
    lost, other = make_backend("r0"), make_backend("r1")
    add(fleet, lost, other)
    lost.refusal = ReplicaLost("gone")
    texts = dict.fromkeys(range(4), "")
    async with Router(fleet).open(make_request(prompt=["a", "b", "c", "d"], max_tokens=2)) as run:
        async for event in run:
            texts[event.index] += event.delta.text
    assert texts == {i: f" p{i}s0w0 p{i}s0w1" for i in range(4)}
    await settle()
    assert outstanding(fleet) == 0


async def test_a_loss_while_submitting_is_not_told_of_prompts_that_moved(fleet):
    lost, other = make_backend("r0"), make_backend("r1")
    add(fleet, lost, other)
    lost.submit_gate.clear()
    run = Router(fleet).open(make_request(prompt=["a", "b"], max_tokens=2))
    reading = asyncio.create_task(exhaust(run))
    await settle()
    lost.refusal = ReplicaLost("gone")
    lost.die(ConnectionResetError("gone"))
    lost.submit_gate.set()
    await asyncio.wait_for(reading, 60)
    assert run.stats.finish_reasons == {FinishReason.LENGTH: 2}
    assert outstanding(fleet) == 0


async def test_when_every_replica_is_lost_the_client_is_told(fleet):
    backends = [make_backend(f"r{i}") for i in range(2)]
    add(fleet, *backends)
    for backend in backends:
        backend.refusal = ReplicaLost("gone")
    with pytest.raises(ModelLoading, match="Every replica") as caught:
        await exhaust(Router(fleet).open(make_request(prompt=["a", "b"])))
    assert (caught.value.status, caught.value.retry_after_s) == (503, 5)
    await settle()
    assert outstanding(fleet) == 0


async def test_an_engine_that_fails_is_asked_once_more_and_what_it_had_left_of_the_request_is_aborted(fleet):
    backend = make_backend("r0", is_stepped=True)
    add(fleet, backend)
    run = Router(fleet).open(make_request(n=2, max_tokens=1))
    reading = asyncio.create_task(collected(run))
    await settle_until(lambda: backend.num_live == 2)
    failed = backend.submissions[0][0].request_id
    backend.send("router-0", Delta(request_id=failed, sample=1, error=EngineFailed("the logits are not numbers")))
    await settle_until(lambda: len(backend.submissions) == 2 and backend.aborted == [failed])
    assert backend.num_live == 2
    backend.step()
    assert await asyncio.wait_for(reading, 60) == [" p0s0w0", " p0s1w0"]


async def test_a_replica_whose_files_of_an_adapter_are_gone_is_passed_over(fleet):
    backends = [make_backend(f"r{i}") for i in range(2)]
    add(fleet, *backends)
    backends[0].refusal = AdapterUnusable("its files cannot be read", "model")
    for _ in range(4):
        assert await asyncio.wait_for(collected(Router(fleet).open(make_request(max_tokens=1))), 60) == [" p0s0w0"]
    backends[1].refusal = backends[0].refusal
    with pytest.raises(AdapterUnusable):
        await exhaust(Router(fleet).open(make_request(max_tokens=1)))


async def test_an_engine_that_fails_twice_is_told_of(fleet):
    backends = [make_backend(f"r{i}", is_stepped=True) for i in range(3)]
    add(fleet, *backends)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(n=2))))
    for _ in range(2):
        await settle_until(lambda: any(backend.num_live for backend in backends))
        next(backend for backend in backends if backend.num_live).fail(EngineFailed("the logits are not numbers"))
        await settle()
    with pytest.raises(EngineFailed, match="not numbers"):
        await asyncio.wait_for(reading, 60)
    assert sorted(len(backend.submissions) for backend in backends) == [0, 1, 1]
    assert outstanding(fleet) == 0


def slow(max_pending_events: int, slow_reader: Literal["pause", "abort"] = "pause") -> RouterConfig:
    return RouterConfig(run=RunSettings(max_pending_events=max_pending_events, slow_reader=slow_reader))


def endless(request: GenerationRequest, sample: int) -> list[str]:
    return [f" w{position}" for position in range(200)]


async def test_what_nobody_reads_is_not_computed_beyond_the_bound_and_goes_on_when_it_is_read(fleet):
    backend = FakeBackend(replica_card("r0", model_card("tiny")), script=endless, is_stepped=True)
    add(fleet, backend)
    async with Router(fleet, slow(8)).open(make_request(stream=True, max_tokens=100)) as run:
        for _ in range(50):
            backend.step()
            await settle()
        assert backend.paused, "the engine was told"
        texts = []
        while run.has_ready:
            texts.append((await anext(run)).delta.text)
        assert 8 < len(texts) <= 12, "what was on its way has its place, nothing more comes"
        await settle_until(lambda: not backend.paused)
        for _ in range(100):
            backend.step()
            await settle()
            while run.has_ready:
                texts.append((await anext(run)).delta.text)
    assert texts == [f" w{position}" for position in range(100)]


async def test_a_slow_reader_may_be_ended_instead(fleet):
    backend = make_backend("r0", is_stepped=True)
    add(fleet, backend)
    async with Router(fleet, slow(4, "abort")).open(make_request(stream=True)) as run:
        for _ in range(10):
            backend.step()
            await settle()
        assert (backend.num_live, len(backend.aborted)) == (0, 1)
        texts = [(await anext(run)).delta.text for _ in range(5)]
        with pytest.raises(DeadlineExceeded, match="too slowly"):
            await anext(run)
    assert texts == [f" p0s0w{position}" for position in range(5)]


async def test_an_answer_that_is_kept_back_is_never_paused(fleet):
    backend = make_backend("r0", is_stepped=True)
    add(fleet, backend)
    reading = asyncio.create_task(collected(Router(fleet, slow(1)).open(make_request(max_tokens=30))))
    await settle_until(lambda: backend.num_live == 1)
    for _ in range(30):
        backend.step()
    assert len((await asyncio.wait_for(reading, 60))[0].split()) == 30
    assert not backend.paused


async def test_a_request_ends_at_its_deadline(fleet):
    backend = make_backend("r0", is_stepped=True)
    add(fleet, backend)
    run = Router(fleet, RouterConfig(run=RunSettings(timeout_s=0.01))).open(make_request())
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        await exhaust(run)
    await settle()
    assert backend.num_live == 0


async def test_a_submission_that_is_not_answered_ends_at_the_deadline(fleet):
    backend = make_backend("r0", is_stepped=True)
    backend.submit_gate.clear()
    add(fleet, backend)
    with pytest.raises(DeadlineExceeded):
        async with Router(fleet, RouterConfig(run=RunSettings(timeout_s=0.01))).open(make_request()):
            pytest.fail("the run was entered")
    backend.submit_gate.set()
    await settle()
    assert backend.num_live == 0
