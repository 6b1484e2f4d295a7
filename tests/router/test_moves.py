"""Completions whose replica dies or leaves go on at another one, where they stopped."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest
from starlette.requests import Request

from serve_app.core.delta import Usage
from serve_app.core.errors import ModelLoading
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
    assert await asyncio.wait_for(reading, 30) == [" p0s0w0 p0s0w1"]


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
