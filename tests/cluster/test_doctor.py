"""The doctor beside a real cluster whose operator left doors open; one with keys is beside `test_keys`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.started import REPOSITORY, Started

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process belongs to is told by /proc"),
]


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


def test_doors_that_were_left_open_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "")
    monkeypatch.setenv("RAY_DEBUG_POST_MORTEM", "0")
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    run = Started(tmp_path)
    try:
        run.until_ready()
        code, found, told = findings(tmp_path, run)
        assert code == 1
        assert found == {
            ("ray-token", "error"),  # beside ports that are open to others
            ("ray-dashboard", "warning"),  # on loopback alone
            ("ray-ports", "error"),
            ("headers", "warning"),
            ("debug", "warning"),
        }, told
    finally:
        run.end()
