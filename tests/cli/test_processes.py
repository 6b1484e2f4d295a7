"""What belongs to a run is found and ended wherever it went, and nothing else is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.cli.processes import (
    Process,
    end_runs,
    is_running,
    listener_on,
    processes_of_runs,
    send,
    send_to_parent,
    start_guard,
)
from tests.cli.runs import end, needs_proc, new_run, start, until, until_gone

pytestmark = needs_proc

STRAY = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""
DEAF = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
GUARDED = """
import os, subprocess, sys
from serve_app.cli.processes import start_guard
from serve_app.cli.environment import RUN_VARIABLE
guard = start_guard(sys.argv[1], grace_s=0.2)
wait = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(wait, env=os.environ | {RUN_VARIABLE: sys.argv[1]}, start_new_session=True)
print(guard.pid, flush=True)
child.wait()
"""


def test_every_process_of_a_run_is_ended_and_none_of_another() -> None:
    run, other = new_run(), new_run()
    first, second = start(run, STRAY + DEAF), start(other, "")
    try:
        until(lambda: len(processes_of_runs(run)) == 2)  # it, and a child in a session of its own
        assert end_runs(run) == 2
        assert processes_of_runs(run) == []
        assert [each.pid for each in processes_of_runs(other)] == [second.pid]
    finally:
        end(first)
        end(second)


def test_a_run_that_ends_by_itself_in_time_is_not_killed() -> None:
    run = new_run()
    process = start(run, "")
    process.terminate()
    assert end_runs(run, grace_s=20) == 0
    process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_a_process_that_was_given_a_dead_ones_id_is_not_signalled() -> None:
    bystander = start(None, "")
    try:
        dead = Process(pid=bystander.pid, program="python", command="gone", run=new_run())
        assert not is_running(dead)
        send(dead, signal.SIGKILL)
        assert bystander.poll() is None
        send(Process(pid=bystander.pid, program="python", command="it", run=None), signal.SIGKILL)
        bystander.wait(60)
    finally:
        end(bystander)


def test_only_the_parent_that_is_meant_is_signalled() -> None:
    parent, bystander = start(None, STRAY), start(None, "")
    try:
        (child,) = map(_only_id, _children(parent.pid))
        assert not send_to_parent(child, bystander.pid, signal.SIGKILL)
        assert bystander.poll() is None
        assert send_to_parent(child, parent.pid, signal.SIGKILL)
        parent.wait(60)
        assert not send_to_parent(child, parent.pid, signal.SIGKILL), "it has another parent now"
        os.kill(child.pid, signal.SIGKILL)
    finally:
        end(parent)
        end(bystander)


def test_what_a_killed_parent_leaves_behind_is_ended_by_its_guard() -> None:
    run = new_run()
    command = [sys.executable, "-c", GUARDED, run]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    guard = int(parent.stdout.readline())
    until(lambda: len(processes_of_runs(run)) == 1)
    end(parent)
    until_gone(run)
    until(lambda: b"cli.guard" not in _command(guard))


def test_a_guard_of_a_run_that_is_over_ends_at_once() -> None:
    guard = start_guard(new_run(), grace_s=600)
    guard.communicate(timeout=60)
    assert guard.returncode == 0


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_who_listens_on_a_port_is_found(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        port = int(listener.getsockname()[1])
        assert listener_on(port) is None, "bound, not listening"
        listener.listen()
        found = listener_on(port)
    assert found is not None
    assert (found.pid, found.run) == (os.getpid(), None)


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _only_id(pid: int) -> Process:
    return Process(pid=pid, program="python", command="python", run=None)


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
