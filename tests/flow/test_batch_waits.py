"""What the lines of a batch wait for, and what they do not wait for: limits, models, other batches."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import openai
import pytest

from serve_app.core.batches import REST_S, Answered
from serve_app.core.errors import Unavailable
from serve_app.core.tenants import Identity
from serve_app.router.batch_worker import UNKNOWN_S
from serve_app.router.router import Router
from tests.flow.batching import BatchHouse, Node, backend, created, jsonl, requests, sent


@pytest.fixture
def house(tmp_path: Path) -> BatchHouse:
    return BatchHouse(tmp_path, f"sqlite:///{tmp_path / 'store.db'}")


def statuses_of(node: Node) -> Counter[int]:
    """Count how lines are answered from now on."""
    answer, statuses = node.worker.answer, Counter[int]()

    async def counted(router: Router, identity: Identity, path: str, body: bytes, request_id: str) -> Answered:
        answered = await answer(router, identity, path, body, request_id)
        statuses[answered.status] += 1
        return answered

    node.worker.answer = counted
    return statuses


async def test_a_batch_does_not_wait_for_its_tenants_batch_of_another_model(house: BatchHouse) -> None:
    busy = backend(slots=1, is_stepped=True)
    node = Node(house, [busy, backend(1, model="other")])
    first = await created(node, jsonl(requests(9)))
    second = await node.until((await created(node, jsonl(requests(3, model="other")))).id)
    assert (second.status, second.request_counts.completed) == ("completed", 3)  # type: ignore[union-attr]
    assert (await node.client().batches.retrieve(first.id)).status == "in_progress"
    await node.kill()


async def test_a_batch_that_is_asked_for_again_under_its_idempotency_key_is_one(house: BatchHouse) -> None:
    node = Node(house, [backend()])
    client, headers = node.client(), {"idempotency-key": "nightly"}
    asked = {"input_file_id": await sent(node, jsonl(requests(1))), "endpoint": "/v1/completions"}

    async def create(window: str = "24h") -> openai.types.Batch:
        body = {**asked, "completion_window": window}
        return await client.post("/batches", body=body, cast_to=openai.types.Batch, options={"headers": headers})

    first, again = await asyncio.gather(create(), create())
    assert first == again
    await node.until(first.id)
    assert (await create()).id == first.id, "whatever became of the batch"
    await node.kill()
    node = Node(house, [backend()])
    client = node.client()
    assert (await create()).status == "completed", "a router that is new knows it, too"
    with pytest.raises(openai.UnprocessableEntityError):
        await create("1h")
    listed = await client.get("/batches", cast_to=object, options={"headers": headers})
    assert [each["id"] for each in listed["data"]] == [first.id]  # type: ignore[index]
    await node.kill()


async def test_a_limit_of_the_tenant_slows_its_batch_and_fails_no_line(house: BatchHouse) -> None:
    house.limit("acme", requests_per_minute=4)
    node = Node(house, [backend()])
    batch = await node.until((await created(node, jsonl(requests(10)))).id)
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed) == ("completed", 10)
    assert house.now > 1000 + 2 * 60, "ten requests at four a minute begin three minutes"
    await node.kill()


async def test_lines_come_again_as_those_end_that_took_all_that_a_limit_allows(house: BatchHouse) -> None:
    house.limit("acme", max_in_flight=2)
    stepped = backend(slots=8, is_stepped=True)
    node = Node(house, [stepped])
    statuses = statuses_of(node)
    batch = await created(node, jsonl(requests(12)))
    began = house.now
    while (found := await node.client().batches.retrieve(batch.id)).status != "completed":
        stepped.step()
        await node.tend()
    assert found.request_counts is not None
    assert (found.request_counts.completed, house.now - began < 30) == (12, True), house.now - began
    assert statuses[429] <= 6 + (house.now - began) / REST_S, "six at first, then one to see whether more may begin"
    await node.kill()


async def test_what_a_limit_leaves_is_for_the_batch_that_has_nothing_of_it_first(house: BatchHouse) -> None:
    house.limit("acme", max_in_flight=2)
    busy, other = backend(slots=8, is_stepped=True), backend(1, model="other", slots=8, is_stepped=True)
    node = Node(house, [busy, other])
    await created(node, jsonl(requests(40)))
    for _ in range(6):
        await node.tend()
    late = await created(node, jsonl(requests(1, model="other")))
    began = house.now
    while (await node.client().batches.retrieve(late.id)).status != "completed":
        busy.step()
        other.step()
        await node.tend()
        assert house.now < began + 30, "the batch before has forty lines, two at a time"
    await node.kill()


async def test_after_a_limit_was_reached_few_lines_are_refused_and_its_end_is_soon_noticed(house: BatchHouse) -> None:
    house.limit("acme", requests_per_minute=1)
    node = Node(house, [backend(slots=64)])
    statuses = statuses_of(node)
    batch = await created(node, jsonl(requests(200)))
    await node.until(batch.id, "in_progress")
    for _ in range(10):
        await node.tend()
    first = statuses[429]
    for _ in range(600):
        await node.tend()
    assert statuses[429] - first < 30, "five minutes, not 63 lines in each"
    house.limit("acme", requests_per_minute=100_000)
    began = house.now
    assert (await node.until(batch.id)).request_counts.completed == 200  # type: ignore[union-attr]
    assert house.now < began + 120
    await node.kill()


async def test_lines_wait_for_a_model_that_no_router_knows_yet_and_fail_where_it_never_comes(
    house: BatchHouse,
) -> None:
    node, late = Node(house, []), backend()
    first = await created(node, jsonl(requests(2)))
    await node.until(first.id, "in_progress")
    for _ in range(20):
        await node.tend()
    node.fleet.put(late.card, late)
    assert (await node.until(first.id)).request_counts.completed == 2  # type: ignore[union-attr]
    second = await created(node, jsonl(requests(1, model="never")))
    began = house.now
    batch = await node.until(second.id)
    assert batch.request_counts is not None
    assert (batch.request_counts.failed, house.now - began > UNKNOWN_S) == (1, True)
    await node.kill()


async def test_lines_are_computed_again_where_the_service_fails_and_no_more_than_thrice(house: BatchHouse) -> None:
    failing = backend()
    node = Node(house, [failing])
    failing.refusal = Unavailable("full", None, {"retry_after_s": 1})
    batch = await created(node, jsonl(requests(2)))
    await node.until(batch.id, "in_progress")
    for _ in range(30):
        await node.tend()
    failing.refusal = None
    assert (await node.until(batch.id)).request_counts.completed == 2  # type: ignore[union-attr]
    await node.kill()
