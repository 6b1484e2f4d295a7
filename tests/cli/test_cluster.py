"""The process that holds a cluster: how often it asks Serve how far it is, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from serve_app.cli.cluster import ROUTER_DEPLOYMENT, TELL_S, TELL_SETTLED_S, pause_after
from serve_app.deployments import apps

ENDS = """
import signal, sys, threading, time
from serve_app.cli.cluster import hold_until_interrupted
def farewell():
    print("farewell", flush=True)
    {farewell}
    print("said", flush=True)
def be_signalled():
    while sys.stdin.readline():
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
threading.Thread(target=be_signalled, daemon=True).start()
signal.signal(signal.SIGINT, signal.default_int_handler)
hold_until_interrupted(lambda: print("ready", flush=True), farewell)
print("interrupted", flush=True)
"""
ENDS_S = 60.0  # it takes 1


@pytest.mark.parametrize(
    ("statuses", "pause_s"),
    [
        ([], TELL_S),
        (["RUNNING"], TELL_SETTLED_S),
        (["RUNNING", "RUNNING"], TELL_SETTLED_S),
        (["RUNNING", "DEPLOYING"], TELL_S),
        (["UNHEALTHY"], TELL_S),
    ],
)
def test_serve_is_seldom_asked_where_all_run(statuses: list[str], pause_s: float) -> None:
    told = {f"app-{number}": {"status": status} for number, status in enumerate(statuses)}
    assert pause_after(told) == pause_s


def ended(farewell: str, *, num_signals: int = 1, wake: bool = True) -> str:
    """What it says from the first interruption on, each further one behind the beginning of its farewell. `wake`: they
    interrupt the main thread's sleep; one that another thread takes does not.
    """
    command = [sys.executable, "-c", ENDS.format(farewell=farewell)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(ENDS_S, process.kill)
        late.start()
        assert process.stdout.readline() == "ready\n"

        def interrupt() -> None:
            if wake:
                process.send_signal(signal.SIGINT)
            else:
                print(file=process.stdin, flush=True)

        interrupt()
        said = process.stdout.readline()
        for _ in range(num_signals - 1):
            interrupt()
        said += process.stdout.read()
        late.cancel()
        return said


def test_an_interruption_ends_it_behind_its_farewell() -> None:
    assert ended("time.sleep(0.2)") == "farewell\nsaid\ninterrupted\n"


def test_it_ends_though_its_farewell_fails() -> None:
    assert ended("raise RuntimeError") == "farewell\ninterrupted\n"


def test_a_second_interruption_waits_for_no_farewell() -> None:
    assert ended("while True: time.sleep(0.1)", num_signals=2) == "farewell\ninterrupted\n"


def test_interruptions_that_do_not_wake_it_are_heard() -> None:
    assert ended("pass", wake=False) == "farewell\nsaid\ninterrupted\n"


def test_it_knows_routers_by_their_name() -> None:
    assert ROUTER_DEPLOYMENT == apps.ROUTER_DEPLOYMENT
