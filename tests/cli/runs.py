"""Small processes that say they belong to a run, as every process of a cluster does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable

import pytest

from serve_app.cli.environment import RUN_VARIABLE
from serve_app.cli.processes import processes_of_runs
from serve_app.cli.up import origin_of

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="what a process belongs to is told by /proc")

WAIT_S = 60.0


def new_run(port: int = 1, file: str = "no file") -> str:
    """A name that no other run has: of the file, as this checkout serves it."""
    return f"{port}-test{uuid.uuid4().hex[:12]} {origin_of(file)}"


def start(run: str | None, code: str) -> subprocess.Popen[bytes]:
    """Python that runs the code and then waits to be ended; its own session, like a cluster's."""
    marker = {} if run is None else {RUN_VARIABLE: run}
    command = [sys.executable, "-c", f"{code}\nprint('.', flush=True)\nimport time\ntime.sleep(600)"]
    process = subprocess.Popen(command, env=os.environ | marker, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b".\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def until_gone(run: str) -> None:
    """Wait until no process of the run is left."""
    until(lambda: not processes_of_runs(run))


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
