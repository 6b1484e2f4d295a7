"""Whose text is cut into tokens next, and how many characters may wait for that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest

from serve_app.core.errors import Overloaded
from serve_app.core.prompt import Prompt
from serve_app.core.request import ContextParams, GenerationRequest
from serve_app.core.shares import Share
from serve_app.deployments.loading import load_replica
from serve_app.replica.tokenizer_pools import OLDEST_EVERY, POOLS, TextQueue, TokenizerPools, Work
from tests.engine.conftest import DEMO
from tests.engine.harness import config, request

A, B = Share(flow="a"), Share(flow="b")
LONG = 500_000


def asked(size: int, share: Share = A, name: str = "r") -> list[GenerationRequest]:
    return [replace(request(name), prompt=Prompt(parts=("x" * size,)), share=share)]


class Behind:
    """Work that is given to pools while their one thread for such texts waits at a gate, and what was done of it."""

    def __init__(self, pools: TokenizerPools) -> None:
        self.pools = pools
        self.done: list[tuple[str, int]] = []
        self.begun, self.gate = threading.Event(), threading.Event()
        self.tasks = [self._begin(asked(LONG), self._wait)]

    async def add(self, size: int, share: Share = A) -> asyncio.Task[object]:
        while not self.begun.is_set():  # noqa: ASYNC110  # else what is added could pass it
            await asyncio.sleep(0.001)
        task = self._begin(asked(size, share), lambda: self.done.append((share.flow, size)))
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def finish(self) -> None:
        self.gate.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.to_thread(self.pools.close)

    def _wait(self) -> None:
        self.begun.set()
        self.gate.wait()

    def _begin(self, requests: list[GenerationRequest], work: Callable[[], object]) -> asyncio.Task[object]:
        return asyncio.create_task(self.pools.run(requests, work))


@pytest.mark.law("Nobody is held up")
async def test_one_text_of_another_flow_is_not_behind_many_long_ones() -> None:
    behind = Behind(TokenizerPools())
    for _ in range(200):
        await behind.add(LONG)
    await behind.add(40_000, B)
    await behind.finish()
    assert behind.done.index(("b", 40_000)) <= 1


async def test_shorter_texts_of_a_flow_pass_longer_ones() -> None:
    behind = Behind(TokenizerPools())
    for _ in range(200):
        await behind.add(LONG)
    await behind.add(40_000)
    await behind.finish()
    assert behind.done.index(("a", 40_000)) <= 1


async def test_what_nobody_waits_for_any_more_is_not_done() -> None:
    behind = Behind(TokenizerPools())
    gone = await behind.add(40_000)
    await behind.add(50_000)
    gone.cancel()
    await asyncio.wait([gone])  # it is told with the next turn of the loop, and the gate would open before
    await behind.finish()
    assert behind.done == [("a", 50_000)]
    assert gone.cancelled()


async def test_an_error_in_the_work_is_that_of_who_asked_for_it() -> None:
    pools = TokenizerPools()

    def fail() -> None:
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        await pools.run(asked(10), fail)
    assert await pools.run(asked(10), lambda: 5) == 5
    await asyncio.to_thread(pools.close)


async def test_what_has_not_begun_when_the_lanes_close_is_dropped() -> None:
    behind = Behind(TokenizerPools())
    dropped = await behind.add(40_000)
    closing = asyncio.create_task(asyncio.to_thread(behind.pools.close))
    while not dropped.done():
        await asyncio.sleep(0.001)
        behind.gate.set()
    await closing
    assert dropped.cancelled()
    assert behind.done == []


def taken(turns: TextQueue) -> list[tuple[str, int]]:
    return [(work.share.flow, work.size) for work in iter(turns.take, None)]


def put(turns: TextQueue, *sizes: int, share: Share = A) -> None:
    for size in sizes:
        turns.add(Work(share=share, size=size, do=lambda: None))


def test_flows_get_as_many_characters_as_each_other_by_their_weights() -> None:
    turns = TextQueue()
    put(turns, *[100] * 40)
    put(turns, *[10] * 400, share=B)
    put(turns, *[10] * 400, share=Share(flow="c", weight=2.0))
    found = taken(turns)[:400]
    given = {flow: sum(size for each, size in found if each == flow) for flow in "abc"}
    assert abs(given["a"] - given["b"]) <= 100
    assert abs(given["c"] - 2 * given["b"]) <= 100


def test_a_flow_that_wanted_nothing_is_owed_nothing() -> None:
    turns = TextQueue()
    put(turns, *[100] * 40)
    for _ in range(20):
        turns.take()
    put(turns, *[100] * 20, share=B)
    found = taken(turns)
    assert abs([flow for flow, _ in found[:10]].count("a") - 5) <= 1


def test_the_oldest_of_a_flow_waits_for_a_few_shorter_ones_only() -> None:
    turns = TextQueue()
    put(turns, 1000)
    sizes = []
    for _ in range(OLDEST_EVERY):
        put(turns, 1, 1)
        work = turns.take()
        assert work is not None
        sizes.append(work.size)
    assert 1000 in sizes


def test_of_flows_that_have_gone_nothing_is_kept() -> None:
    turns = TextQueue()
    for number in range(100):
        put(turns, 5, share=Share(flow=f"{number}"))
        turns.take()
    assert turns._given == {}
    assert turns._flows == {}


def entered(pools: TokenizerPools, size: int, share: Share, rooms: ExitStack) -> int:
    """How many calls of such a size find room, one behind the other."""
    for number in range(1000):
        try:
            rooms.enter_context(pools.room_for(asked(size, share)))
        except Overloaded:
            return number
    raise AssertionError("no bound")


def test_so_many_characters_wait_and_no_more_and_no_flow_takes_the_room_of_all() -> None:
    pools, most = TokenizerPools(8_000_000), 8_000_000
    with ExitStack() as rooms:
        num_greedy = entered(pools, LONG, A, rooms)
        assert most / 4 <= num_greedy * LONG <= most / 2
        assert entered(pools, 40_000, A, rooms) > 10, "longer ones are refused before shorter ones"
        assert entered(pools, LONG, B, rooms) >= 1
        assert pools._num_waiting.total() <= most
        for flow in range(20):
            entered(pools, 40_000, Share(flow=f"f{flow}"), rooms)
        assert pools._num_waiting.total() <= most
        with pools.room_for(asked(POOLS[0][0] or 0)):
            pass
    assert not pools._num_waiting
    pools.close()


def test_a_text_alone_has_room_however_long_it_is() -> None:
    pools = TokenizerPools(100_000)
    with (
        pools.room_for(asked(LONG)),
        pytest.raises(Overloaded, match=r"40000 more .* beside 500000 .* of 100000") as told,
    ):
        pools.room_for(asked(40_000, B)).__enter__()
    assert told.value.retry_after_s
    pools.close()


@pytest.mark.slow
async def test_a_replica_refuses_texts_beyond_what_may_wait_and_takes_them_when_there_is_room() -> None:
    behind = Behind(TokenizerPools(100_000))
    service = load_replica(config(DEMO), replica_id="r1", pools=behind.pools)
    service.start()
    first, second = (
        [replace(each, context=ContextParams(truncates_prompt=True)) for each in asked(size, share, name)]
        for size, share, name in ((300_000, A, "first"), (40_000, B, "second"))
    )
    submission = asyncio.create_task(service.submit("router", first))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await service.submit("router", second)
    assert service.num_open == 1
    behind.gate.set()
    await submission
    await service.submit("router", second)
    await behind.tasks[0]
    await service.close()
