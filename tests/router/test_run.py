"""A run brings every choice to one end, and leaves nothing behind however it is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest

from serve_app.api.completion import CompletionRequest
from serve_app.api.parse import parse_completion
from serve_app.core.delta import FinishReason, Usage
from serve_app.core.errors import (
    DeadlineExceeded,
    EngineFailed,
    ModelNotFound,
    Overloaded,
    ReplicaLost,
)
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router, RouterConfig
from serve_app.router.run import Run
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card


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


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def outstanding(fleet: Fleet) -> int:
    return sum(link.num_outstanding for link in fleet.links_for(fleet.resolve("tiny")))


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
    assert run.finish_reasons == {FinishReason.LENGTH: 6}


async def test_usage_counts_each_prompt_once_and_every_completion(fleet):
    add(fleet, make_backend("r0"))
    request = make_request(prompt=["one two", "three"], n=3, max_tokens=4)
    async with Router(fleet).open(request) as run:
        async for _ in run:
            pass
    assert run.usage == Usage(prompt_tokens=3, completion_tokens=24, cached_tokens=1)


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
    async with Router(fleet).open(make_request(prompt=["a", "b"])) as run:
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


async def test_a_lost_replica_ends_the_run_and_aborts_the_rest_elsewhere(fleet):
    dying, other = make_backend("r0", is_stepped=True), make_backend("r1", is_stepped=True)
    add(fleet, dying, other)
    run = Router(fleet).open(make_request(prompt=["a", "b"]))
    with pytest.raises(ReplicaLost):
        await exhaust(run, meanwhile=lambda: dying.die(ConnectionResetError("gone")))
    await settle()
    assert other.num_live == 0
    assert outstanding(fleet) == 0


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
    await asyncio.wait_for(reading, 5)
    assert run.finish_reasons == {FinishReason.LENGTH: 2}
    assert outstanding(fleet) == 0


async def test_when_every_replica_is_lost_the_client_is_told(fleet):
    backends = [make_backend(f"r{i}") for i in range(2)]
    add(fleet, *backends)
    for backend in backends:
        backend.refusal = ReplicaLost("gone")
    with pytest.raises(ReplicaLost):
        await exhaust(Router(fleet).open(make_request(prompt=["a", "b"])))
    await settle()
    assert outstanding(fleet) == 0


async def test_an_error_of_one_sequence_is_raised(fleet):
    backend = make_backend("r0", is_stepped=True)
    add(fleet, backend)
    run = Router(fleet).open(make_request(n=2))
    with pytest.raises(EngineFailed, match="not numbers"):
        await exhaust(run, meanwhile=lambda: backend.fail(EngineFailed("the logits are not numbers")))
    assert outstanding(fleet) == 0


async def test_a_request_ends_at_its_deadline(fleet):
    backend = make_backend("r0", is_stepped=True)
    add(fleet, backend)
    run = Router(fleet, RouterConfig(timeout_s=0.01)).open(make_request())
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        await exhaust(run)
    await settle()
    assert backend.num_live == 0


async def test_a_submission_that_is_not_answered_ends_at_the_deadline(fleet):
    backend = make_backend("r0", is_stepped=True)
    backend.submit_gate.clear()
    add(fleet, backend)
    with pytest.raises(DeadlineExceeded):
        async with Router(fleet, RouterConfig(timeout_s=0.01)).open(make_request()):
            pytest.fail("the run was entered")
    backend.submit_gate.set()
    await settle()
    assert backend.num_live == 0
