"""`serve_app up` from its start to its end: what it answers, where it listens, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.cli.processes import listener_on
from tests.cluster.started import TIMEOUT_S, Started

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process belongs to is told by /proc"),
]

LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as the kernel writes them."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    run = Started(tmp_path)
    yield run
    run.end()


def test_it_serves_the_demo_on_loopback_and_a_ctrl_c_leaves_nothing_behind(started: Started) -> None:
    started.until(lambda: started.process.poll() is not None or "Ready on" in started.said.read_text(errors="replace"))
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4}
    response = httpx.post(f"{started.url}/v1/completions", json=body, timeout=30)
    assert response.json()["usage"]["completion_tokens"] == 4, response.text
    assert "Starting Ray with RAY_memory_monitor_refresh_ms, " in started.said.read_text(errors="replace")
    eager = [each for each in started.processes() if _oom_score(each.pid) > _oom_score(os.getpid())]
    assert eager == [], "the kernel would take them before any other process"
    assert _statuses_beside_another(started, body) == [503, 200], (
        "the proxy takes one at a time, and counts it out again"
    )
    large = httpx.get(f"{started.url}/health", headers={"large": "x" * 1_000_000}, timeout=30)
    assert (large.status_code, large.json()["error"]["code"]) == (431, "headers_too_large")
    outside = [each.command for each in started.processes() if _listens_outside(each.pid)]
    assert {command.split(":")[2] for command in outside} <= {"ServeReplica"}, "Serve binds those, and wants a token"
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(TIMEOUT_S) == 0
    assert started.processes() == []
    assert listener_on(started.port) is None


def _statuses_beside_another(started: Started, body: dict[str, Any]) -> list[int]:
    """Of a completion while another one's body is awaited, and after that."""
    with socket.create_connection(("127.0.0.1", started.port)) as other:
        other.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
        refused = _until_other_than(200, started, body)
        assert refused.json()["error"]["error_code"] == "overloaded"
        assert "as may be at once (1)" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
    return [refused.status_code, _until_other_than(503, started, body).status_code]


def _until_other_than(status: int, started: Started, body: dict[str, Any]) -> httpx.Response:
    """Each on a connection of its own, so that none is left unread."""
    answers: list[httpx.Response] = []

    def is_other() -> bool:
        answers.append(httpx.post(f"{started.url}/v1/completions", json=body, timeout=30))
        return answers[-1].status_code != status

    started.until(is_other)
    return answers[-1]


def test_a_cluster_ends_with_the_process_that_started_it_however_that_ends(started: Started) -> None:
    started.until_a_worker_runs()
    started.process.kill()
    started.until(lambda: not started.processes())
    assert listener_on(started.port) is None


def test_a_cluster_whose_raylet_died_is_given_up_and_nothing_of_it_is_left(started: Started) -> None:
    started.until_a_worker_runs()
    (raylet,) = (each for each in started.processes() if each.program == "raylet")
    os.kill(raylet.pid, signal.SIGKILL)
    assert started.process.wait(TIMEOUT_S) == 1
    assert "raylet died; ending what is left of the cluster" in started.said.read_text(errors="replace")
    assert started.processes() == []
    assert listener_on(started.port) is None


def _oom_score(pid: int) -> int:
    """What the kernel adds to a process's size when it looks for one to kill."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def _listens_outside(pid: int) -> bool:
    """Whether the process has a TCP socket that listens on more than loopback."""
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path("/proc/net", table).read_text().splitlines()[1:]]
    outside = {
        f"socket:[{row[9]}]" for row in rows if row[3] == LISTENING and row[1].rpartition(":")[0] not in LOOPBACK
    }
    return bool(outside & {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()})
