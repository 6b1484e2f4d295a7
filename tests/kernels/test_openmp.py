"""How threads wait, seen at the threads that there are and at the time that the process takes of its processors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from serve_app.kernels.openmp import (
    CROWDED,
    LOOK_S,
    ROOMY,
    Wakefulness,
    compute_alone,
    cpu_times,
    libgomp,
    num_cpus,
)

NUM_CPUS = num_cpus()
pytestmark = pytest.mark.skipif(libgomp() is None or NUM_CPUS < 2, reason="torch without libgomp, or one CPU")

SPIN = """
import sys, time, torch
from serve_app.kernels.openmp import Wakefulness
threads = 2
torch.set_num_threads(threads)
x = torch.ones(1 << 16)
wakefulness = Wakefulness()
wakefulness._num_threads = threads
wakefulness.rest(is_crowded=sys.argv[1] == "crowded")
x.add_(1)
own = time.process_time()
for _ in range(40 if sys.argv[1] == "crowded" else 2000):
    x.add_(1)
    time.sleep(0.01)
    if time.process_time() - own > 0.2:  # it is clear by now, and a busy machine takes long to come so far
        break
print(time.process_time() - own)
"""


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def wait_until(is_so: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return is_so()


def test_a_crowd_adds_a_team_that_ends_with_it() -> None:
    wakefulness = Wakefulness()
    before = num_threads()
    wakefulness.rest(is_crowded=True)
    assert wakefulness.is_asleep
    assert num_threads() >= before + NUM_CPUS
    wakefulness.rest(is_crowded=True)  # which changes nothing
    wakefulness.rest(is_crowded=False)
    assert not wakefulness.is_asleep
    assert wait_until(lambda: num_threads() <= before)
    wakefulness.close()


@pytest.mark.parametrize("policy", ["awake", "crowded"])
def test_a_team_sends_all_others_to_sleep(policy: str) -> None:
    """With so long a time of waiting awake that it shows: 40 waits of 10 ms."""
    took = subprocess.run(
        [sys.executable, "-c", SPIN, policy], capture_output=True, text=True, check=True,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000000000", "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    seconds = float(took.stdout)
    assert (seconds > 0.08) == (policy == "awake"), seconds


class Times:
    """Of CPUs on which others use `others` cores, told as `cpu_times` tells it."""

    def __init__(self, others: float) -> None:
        self.others = others
        self._busy = 0.0
        self._at = time.monotonic()

    def __call__(self) -> tuple[float, float]:
        now = time.monotonic()
        self._busy += (now - self._at) * self.others
        self._at = now
        return self._busy, 0.0


@pytest.fixture
def may_be_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")


@pytest.mark.usefixtures("may_be_awake")
def test_others_work_sends_to_sleep_and_its_end_wakes() -> None:
    times = Times(0.0)
    wakefulness = Wakefulness(times)
    wakefulness.start(NUM_CPUS)
    try:
        assert wakefulness.is_asleep  # until it was seen that there is room
        assert wait_until(lambda: not wakefulness.is_asleep)
        times.others = CROWDED + 0.2
        assert wait_until(lambda: wakefulness.is_asleep)
        times.others = (CROWDED + ROOMY) / 2  # neither: it stays as it is
        time.sleep(3 * LOOK_S)
        assert wakefulness.is_asleep
        times.others = 0.0
        assert wait_until(lambda: not wakefulness.is_asleep)
    finally:
        wakefulness.close()


@pytest.mark.skipif(NUM_CPUS < 3, reason="two CPUs, which two threads want")
@pytest.mark.usefixtures("may_be_awake")
def test_cpus_that_the_threads_do_not_want_may_be_used_by_others() -> None:
    times = Times(NUM_CPUS - 2)
    wakefulness = Wakefulness(times)
    wakefulness.start(2)
    try:
        assert wait_until(lambda: not wakefulness.is_asleep)
    finally:
        wakefulness.close()


@pytest.mark.parametrize(
    ("threads", "spins"), [(1, "10000"), (NUM_CPUS + 1, "10000"), (NUM_CPUS, "0"), (NUM_CPUS, None)]
)
def test_where_there_is_nothing_to_choose_nothing_begins(
    threads: int, spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spins is None:
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    else:
        monkeypatch.setenv("GOMP_SPINCOUNT", spins)
    before = num_threads()
    wakefulness = Wakefulness(Times(4.0))
    wakefulness.start(threads)
    assert not wakefulness.is_asleep
    assert num_threads() <= before
    wakefulness.close()


def test_a_thread_that_computes_alone_has_no_team() -> None:
    before_threads = torch.get_num_threads()

    def compute() -> int:
        before = num_threads()
        (torch.ones(1 << 20) + 1).sum()
        return num_threads() - before

    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1) as plain, ThreadPoolExecutor(1, initializer=compute_alone) as alone:
            assert alone.submit(compute).result() == 0
            assert plain.submit(compute).result() == 1
    finally:
        torch.set_num_threads(before_threads)


def test_this_process_is_part_of_what_is_busy() -> None:
    busy, own = cpu_times()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    busy_after, own_after = cpu_times()
    assert own_after - own >= 0.3
    assert busy_after - busy >= 0.2  # in hundredths of a second on each CPU
