"""What every test starts from: Ray's switches are set before anything imports Ray, and torch's before torch."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_worker_niceness="0",
    RAY_SERVE_LOG_TO_STDERR="0",
    OMP_NUM_THREADS="1",  # as the cluster file has it; the models are so small that a second thread only costs
    OMP_WAIT_POLICY="PASSIVE",
    HF_HUB_OFFLINE="1",
)
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels are run by Python then; read when triton is first imported

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background so. Programs that tests start would inherit it, and ignore the
    # Ctrl-C by which tests end them.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Random inputs are seeded: the same examples on every machine. HYPOTHESIS_SEARCH=1 looks for new ones. How long a busy
# machine takes to draw them decides nothing.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=not os.environ.get("HYPOTHESIS_SEARCH"),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported stays: to look through it for what is unreachable took a tenth of the CPU time."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files: those with slow tests first, so that no process begins one when the others are done.

    Those with a cluster come last, and of these last those that share one: it takes a good part of a small machine even
    while it idles.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    cluster = {item.path for item in items if item.get_closest_marker("cluster")}
    if any(path.parent.name != "cluster" for path in cluster):
        raise pytest.UsageError("`make test-cluster` looks for tests with a cluster below tests/cluster alone")
    sharing = {item.path for item in items if item.path in cluster and "base_url" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: (item.path in cluster, item.path in sharing, item.path not in slow))


@pytest.fixture(autouse=True)
def number_of_threads() -> Iterator[None]:
    """A test that leaves another number of torch's threads would decide how others compute that come after it."""
    before = _num_threads()
    yield
    after = _num_threads()
    assert before in (None, after), f"{before} threads of torch's before the test, {after} behind it"


def _num_threads() -> int | None:
    """None as long as nothing has imported torch."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.get_num_threads()
