"""Threads give way to those that are waited for, each for itself and for what it starts."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue

import pytest
import torch

from serve_app.core.machine import LONG_WORK, MOST, OWN, give_way, take_leftovers
from serve_app.engine.driver import Driver
from serve_app.kernels.openmp import libgomp
from serve_app.replica.tokenizer_pools import POOLS, TokenizerPools
from tests.engine.conftest import DEMO
from tests.engine.harness import config, make_engine
from tests.replica.test_service import text_request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness is a process's there")


def own_niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def own_policy() -> int:
    return os.sched_getscheduler(threading.get_native_id())


def in_a_thread(work: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("by", [0, 5, LONG_WORK, MOST, 40])
def test_a_thread_gives_way_and_no_other_does(by: int) -> None:
    before = own_niceness()

    def work() -> int:
        give_way(by)
        return own_niceness()

    assert in_a_thread(work) == min(MOST, OWN + by)
    assert own_niceness() == before


def test_what_a_thread_starts_gives_way_too() -> None:
    def work() -> int:
        give_way(3)
        return in_a_thread(own_niceness)

    assert in_a_thread(work) == min(MOST, OWN + 3)


def test_who_says_it_twice_gives_way_once() -> None:
    def work() -> int:
        give_way(3)
        give_way(3)
        return own_niceness()

    assert in_a_thread(work) == min(MOST, OWN + 3)


def test_where_it_may_not_a_thread_goes_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    before = own_niceness(), own_policy()
    give_way(5)
    take_leftovers()
    assert (own_niceness(), own_policy()) == before


def test_leftovers_are_taken_by_a_thread_and_what_it_starts() -> None:
    def work() -> int:
        take_leftovers()
        assert own_policy() == os.SCHED_IDLE
        return in_a_thread(own_policy)

    assert in_a_thread(work) == os.SCHED_IDLE
    assert own_policy() == os.SCHED_OTHER


def test_where_there_are_no_leftovers_a_thread_is_as_nice_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    def work() -> int:
        monkeypatch.setattr(os, "sched_setscheduler", refuse)
        take_leftovers()
        return own_niceness()

    assert in_a_thread(work) == MOST


async def test_long_texts_are_cut_into_tokens_by_threads_that_give_way() -> None:
    pools = TokenizerPools()
    sizes = [1000, *(most + 1 for most, _ in POOLS if most is not None)]
    found = [await pools.run([text_request("a", "x" * size)], own_policy) for size in sizes]
    assert found == [os.SCHED_OTHER, os.SCHED_IDLE, os.SCHED_IDLE]
    pools.close()


@pytest.mark.parametrize(("device", "expected"), [("cpu", 7), ("cuda", 0)])
def test_an_engine_gives_way_where_it_computes_and_not_where_it_launches(device: str, expected: int) -> None:
    engine = make_engine(config(DEMO, niceness=7))
    engine.model = replace(engine.model, device=torch.device(device))
    assert engine.niceness == expected


def test_the_thread_that_steps_has_torchs_number_of_threads_for_kernels_that_ask_openmp() -> None:
    library, before = libgomp(), torch.get_num_threads()
    if library is None:
        pytest.skip("torch computes with another library here")
    found: Queue[int] = Queue()
    driver = Driver(make_engine(config(DEMO)))
    torch.set_num_threads(3)
    try:
        driver.start(lambda *_: None)
        driver.nudge(lambda _: found.put(library.omp_get_max_threads()))
        assert found.get(timeout=60) == 3
    finally:
        torch.set_num_threads(before)
        driver.close()


def test_the_thread_that_steps_gives_way() -> None:
    found: Queue[int] = Queue()
    driver = Driver(make_engine(config(DEMO)), niceness=6)
    driver.start(lambda *_: found.put(own_niceness()))
    driver.abort(frozenset({"nobody"}))
    assert found.get(timeout=60) == min(MOST, OWN + 6)
    driver.close()
