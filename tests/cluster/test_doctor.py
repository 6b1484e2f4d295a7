"""The doctor beside a real cluster whose operator left doors open; one with keys is beside `test_up`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve_app.cli.processes import listener_on
from tests.cluster.started import REPOSITORY, TIMEOUT_S, Started

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process belongs to is told by /proc"),
]

OPENED = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
}


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "serve_app", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        check=False,
        text=True,
    )


def findings(folder: Path, run: Started) -> tuple[int, set[tuple[str, str]], list[str]]:
    """Exit code, check and severity of each finding, and what was found."""
    looks: list[subprocess.CompletedProcess[str]] = []

    def sees_the_service() -> bool:
        looks.append(command(folder, "doctor", "--json"))
        return '"url": null' not in looks[-1].stdout.replace('"url":null', '"url": null')

    run.until(lambda: run.process.poll() is not None or sees_the_service())
    done = looks[-1]
    told = json.loads(done.stdout)
    assert all(check["was_looked_at"] for check in told["checks"])
    found = {(check["name"], each["severity"]) for check in told["checks"] for each in check["findings"]}
    return done.returncode, found, [each["found"] for check in told["checks"] for each in check["findings"]]


@pytest.fixture(scope="module")
def open_doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Nobody is asked for a key; the doctor's own environment is that of the service."""
    with pytest.MonkeyPatch.context() as changes:
        for name, value in OPENED.items():
            changes.setenv(name, value)
        run = Started(tmp_path_factory.mktemp("open"), options=["--dashboard"])
        yield run
        run.end()


def test_doors_that_were_left_open_are_found(open_doors: Started) -> None:
    open_doors.until_ready()
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4}
    answer = httpx.post(f"{open_doors.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
    code, found, told = findings(open_doors.folder, open_doors)
    assert code == 1
    assert found == {
        ("ray-token", "error"),  # beside ports that are open to others
        ("ray-dashboard", "warning"),  # on loopback alone
        ("ray-ports", "error"),
    }, told


def test_a_cluster_whose_raylet_died_is_given_up_and_nothing_of_it_is_left(open_doors: Started) -> None:
    """The last test of this cluster."""
    open_doors.until_a_worker_runs()
    (raylet,) = (each for each in open_doors.processes() if each.program == "raylet")
    os.kill(raylet.pid, signal.SIGKILL)
    assert open_doors.process.wait(TIMEOUT_S) == 1
    assert "raylet died; ending what is left of the cluster" in open_doors.said.read_text(errors="replace")
    assert open_doors.processes() == []
    assert listener_on(open_doors.port) is None
