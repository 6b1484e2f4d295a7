"""Completions whose replica dies or leaves go on at another one, where they stopped."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest
from starlette.requests import Request

from serve_app.core.delta import Usage
from serve_app.core.errors import ModelLoading, Overloaded, Unauthenticated
from serve_app.core.request import GenerationRequest
from serve_app.http.metrics import Metrics, Served
from serve_app.router.router import Router, RouterConfig
from serve_app.router.run import RunSettings
from tests.router.test_run import add, collected, fleet, make_backend, make_request, outstanding, settle, settle_until  # noqa: F401


async def test_a_stream_goes_on_where_it_stopped_whatever_of_it_was_taken(fleet):  # noqa: F811
    dying, other = make_backend("r0", is_stepped=True), make_backend("r1", is_stepped=True)
    add(fleet, dying, other)
    texts = {0: "", 1: ""}
    async with Router(fleet).open(make_request(prompt=["a", "b"], max_tokens=3, stream=True)) as run:
        dying.step()
        dying.step()
        taken = await anext(run)
        texts[taken.index] += taken.delta.text
        await settle()
        dying.die(ConnectionResetError("gone"))
        await settle_until(lambda: other.num_live == 2)
        for _ in range(3):
            other.step()
        async for event in run:
            texts[event.index] += event.delta.text
    assert texts == {i: f" p{i}s0w0 p{i}s0w1 p{i}s0w2" for i in range(2)}
    (moved,) = other.submissions[1]
    assert (len(moved.continued[0].token_ids), moved.is_reported) == (2, True)
    assert run.stats.usage == Usage(prompt_tokens=2, completion_tokens=6)
    assert (run.stats.num_moves, len(run.stats.pauses_s)) == (1, 1)
    metrics = Metrics(fleet)
    metrics.note_request("/v1/completions", Served(status=200, run=run), seconds=1.0)
    text = bytes((await metrics.answer(Request({"type": "http"}))).body).decode()
    for name in ("serve_app_moved_prompts_total", "serve_app_move_pause_seconds_count"):
        assert f'{name}{{model="tiny",router="router-0"}} 1.0' in text
    await settle()
    assert outstanding(fleet) == 0


async def test_the_time_that_a_completion_may_take_counts_on_where_it_goes_on(fleet):  # noqa: F811
    backends = [make_backend(f"r{number}", is_stepped=True) for number in range(3)]
    add(fleet, *backends)
    async with Router(fleet).open(make_request(max_tokens=9, stream=True, t_max_predict_ms=60_000)) as run:
        for _ in range(2):
            (backend,) = (each for each in backends if each.num_live)
            backend.step()
            await anext(run)
            backend.die(ConnectionResetError("gone"))
            await settle()
        limits = {submitted.stop.max_predict_s for each in backends for (submitted,) in each.submissions}
    assert (max(limits), len(limits)) == (60.0, 3)


async def test_replicas_that_are_lost_one_after_the_other_do_not_end_a_stream_that_gets_on(fleet):  # noqa: F811
    backends = [make_backend(f"r{number}", is_stepped=True) for number in range(6)]
    add(fleet, *backends)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(max_tokens=6, stream=True))))
    for number in range(6):
        await settle_until(lambda: any(each.num_live for each in backends))
        (backend,) = (each for each in backends if each.num_live)
        backend.step()
        await settle()
        if number < 5:
            backend.die(ConnectionResetError("gone"))
    assert await asyncio.wait_for(reading, 60) == ["".join(f" p0s0w{word}" for word in range(6))]


async def test_completions_that_have_ended_are_not_asked_for_again(fleet):  # noqa: F811
    def of_lengths(request: GenerationRequest, sample: int) -> list[str]:
        return [f" s{sample}w{position}" for position in range(1 + 2 * sample)]

    dying, other = make_backend("r0", is_stepped=True), make_backend("r1", is_stepped=True)
    dying.script = other.script = of_lengths
    add(fleet, dying)
    run = Router(fleet).open(make_request(n=3, stream=True))
    reading = asyncio.create_task(collected(run))
    await settle_until(lambda: dying.num_live == 3)
    dying.step()
    dying.step()
    await settle()
    add(fleet, other)
    dying.die(ConnectionResetError("gone"))
    await settle_until(lambda: other.num_live == 2)
    (moved,) = other.submissions[0]
    assert moved.samples == (1, 2)
    for _ in range(4):
        other.step()
    assert await asyncio.wait_for(reading, 60) == [" s0w0", " s1w0 s1w1 s1w2", "".join(f" s2w{w}" for w in range(5))]


async def test_a_stream_goes_on_only_where_its_numbers_are_the_same(fleet):  # noqa: F811
    dying, others = make_backend("r0", is_stepped=True), make_backend("r1", is_stepped=True)
    others.card = replace(others.card, model=replace(others.card.model, numerics="other weights"))
    dying.card = replace(dying.card, model=replace(dying.card.model, numerics="weights"))
    add(fleet, dying)
    settings = RunSettings(max_pause_s=0.0)
    async with Router(fleet, RouterConfig(run=settings)).open(make_request(stream=True)) as run:
        dying.step()
        await anext(run)
        add(fleet, others)
        dying.die(ConnectionResetError("gone"))
        with pytest.raises(ModelLoading):
            await anext(run)
    await settle()
    assert others.submissions == []


async def test_a_stream_waits_for_a_replica_in_the_place_of_the_one_that_was_lost(fleet):  # noqa: F811
    dying = make_backend("r0", is_stepped=True)
    add(fleet, dying)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(max_tokens=2, stream=True))))
    await settle_until(lambda: dying.num_live == 1)
    dying.step()
    await settle()
    dying.die(ConnectionResetError("gone"))
    await settle()
    assert not reading.done()
    add(fleet, make_backend("r1"))
    assert await asyncio.wait_for(reading, 60) == [" p0s0w0 p0s0w1"]


async def test_what_a_leaving_replica_computes_goes_on_elsewhere_however_often_that_happens(fleet):  # noqa: F811
    backends = [make_backend(f"r{number}", is_stepped=True) for number in range(6)]
    add(fleet, backends[0])
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(max_tokens=7, stream=True))))
    await settle_until(lambda: backends[0].num_live == 1)
    for old, new in itertools.pairwise(backends):
        old.step()
        await settle()
        fleet.remove(old.card.replica_id)
        await settle()
        assert old.num_live == 1, "no other replica is there: it goes on here"
        add(fleet, new)
        await settle_until(lambda old=old, new=new: (old.num_live, new.num_live) == (0, 1))
    backends[-1].step()
    backends[-1].step()
    assert await asyncio.wait_for(reading, 60) == ["".join(f" p0s0w{word}" for word in range(7))]


async def test_a_stream_waits_where_the_queue_of_the_other_replica_is_full(fleet, monkeypatch):  # noqa: F811
    monkeypatch.setattr("serve_app.router.run.FULL_AGAIN_S", 0.0)
    dying, full = make_backend("r0", is_stepped=True), make_backend("r1")
    add(fleet, dying)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(max_tokens=2, stream=True))))
    await settle_until(lambda: dying.num_live == 1)
    dying.step()
    await settle()
    full.refusal = Overloaded("full")
    add(fleet, full)
    dying.die(ConnectionResetError("gone"))
    await settle()
    assert not reading.done()
    full.refusal = None
    assert await asyncio.wait_for(reading, 60) == [" p0s0w0 p0s0w1"]


async def test_what_a_leaving_replica_had_queued_waits_where_the_other_one_is_full(fleet, monkeypatch):  # noqa: F811
    monkeypatch.setattr("serve_app.router.run.FULL_AGAIN_S", 0.0)
    leaving, full = make_backend("r0", is_stepped=True), make_backend("r1")
    add(fleet, leaving)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(max_tokens=2, stream=True))))
    await settle_until(lambda: leaving.num_live == 1)
    full.refusal = Overloaded("full")
    add(fleet, full)
    fleet.remove("r0")
    await settle()
    assert not reading.done()
    full.refusal = None
    assert await asyncio.wait_for(reading, 60) == [" p0s0w0 p0s0w1"]


async def test_a_prompt_that_has_not_begun_waits_with_one_that_has(fleet):  # noqa: F811
    dying = make_backend("r0", is_stepped=True)
    add(fleet, dying)
    request = make_request(prompt=["a", "b"], max_tokens=2, stream=True)
    reading = asyncio.create_task(collected(Router(fleet).open(request)))
    await settle_until(lambda: dying.num_live == 2)
    await dying.pause(fleet.router_id, [dying.submissions[0][1].request_id])
    dying.step()
    await settle()
    dying.die(ConnectionResetError("gone"))
    await settle()
    assert not reading.done()
    add(fleet, make_backend("r1"))
    assert await asyncio.wait_for(reading, 60) == [f" p{part}s0w0 p{part}s0w1" for part in range(2)]


async def test_a_stream_returns_to_a_replica_that_was_only_out_of_sight(fleet):  # noqa: F811
    one, other = make_backend("r0", is_stepped=True), make_backend("r1", is_stepped=True)
    other.card = replace(other.card, model=replace(other.card.model, adapters=()))
    add(fleet, one)
    reading = asyncio.create_task(collected(Router(fleet).open(make_request(max_tokens=3, stream=True))))
    stays = asyncio.create_task(collected(Router(fleet).open(make_request(model="tiny:sql", max_tokens=3))))
    await settle_until(lambda: one.num_live == 2)
    one.step()
    await settle()
    add(fleet, other)
    fleet.remove("r0")
    await settle_until(lambda: (one.num_live, other.num_live) == (1, 1))
    other.step()
    await settle()
    add(fleet, one)
    fleet.remove("r1")
    await settle_until(lambda: (one.num_live, other.num_live) == (2, 0))
    one.step()
    one.step()
    assert await asyncio.wait_for(reading, 60) == [" p0s0w0 p0s0w1 p0s0w2"]
    await asyncio.wait_for(stays, 60)


async def test_a_run_that_was_ended_gives_nothing_to_another_replica(fleet, monkeypatch):  # noqa: F811
    monkeypatch.setattr("serve_app.router.run.LOOK_AGAIN_S", 0.0)
    dying, other = make_backend("r0", is_stepped=True), make_backend("r1", is_stepped=True)
    add(fleet, dying)
    async with Router(fleet).open(make_request(stream=True)) as run:
        dying.step()
        await anext(run)
        dying.die(ConnectionResetError("gone"))
        await settle()  # it waits for another replica
        run.end(Unauthenticated("revoked"))
        add(fleet, other)
        await settle()
        assert other.submissions == []
