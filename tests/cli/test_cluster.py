"""The process that holds a cluster: how often it asks Serve how far it is, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from serve_app.cli.cluster import ROUTER_DEPLOYMENT, TELL_S, TELL_SETTLED_S, pause_after
from serve_app.deployments import apps

ENDS = """
import sys, time
from serve_app.cli.cluster import say_farewell_first
def farewell():
    print("farewell", flush=True)
    {farewell}
    print("said", flush=True)
say_farewell_first(farewell)
print("ready", flush=True)
try:
    while True:
        time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


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


def ended(farewell: str, *, num_signals: int = 1) -> str:
    """What it says from the first interruption on, each further one behind the beginning of its farewell."""
    command = [sys.executable, "-c", ENDS.format(farewell=farewell)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        said = process.stdout.readline()
        for _ in range(num_signals - 1):
            process.send_signal(signal.SIGINT)
        return said + process.stdout.read()


def test_an_interruption_ends_it_behind_its_farewell() -> None:
    assert ended("time.sleep(0.2)") == "farewell\nsaid\ninterrupted\n"


def test_it_ends_though_its_farewell_fails() -> None:
    assert ended("raise RuntimeError") == "farewell\ninterrupted\n"


def test_a_second_interruption_waits_for_no_farewell() -> None:
    assert ended("time.sleep(600)", num_signals=2) == "farewell\ninterrupted\n"


def test_it_knows_routers_by_their_name() -> None:
    assert ROUTER_DEPLOYMENT == apps.ROUTER_DEPLOYMENT
