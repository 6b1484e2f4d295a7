"""A cluster that `serve_app up` started in a folder of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from serve_app.cli.processes import Process, end_runs, processes_of_runs

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 180.0
RAYS_HASTE = "Timed out waiting for file"
"""Ray's raylet ends itself where its own agents take half a minute to start: other work has the CPUs."""


class Started:
    """`serve_app up` in a folder of its own; what it says goes to a file there.

    change:      of the cluster file
    environment: of its processes, beside this one's
    options:     of `up`
    """

    def __init__(
        self,
        folder: Path,
        change: Callable[[dict[str, Any]], object] = lambda content: None,
        environment: Mapping[str, str] = MappingProxyType({}),
        options: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        self.folder = folder
        self._command = [sys.executable, "-m", "serve_app", "up", *options]
        self._environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | dict(environment)
        self.said = folder / "said.txt"
        content = content_of(self.port)
        change(content)
        (folder / "cluster.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        self.process = self._begun()

    def _begun(self) -> subprocess.Popen[bytes]:
        with self.said.open("wb") as output:
            return subprocess.Popen(
                self._command,
                cwd=self.folder,
                env=self._environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> list[Process]:
        return processes_of_runs(f"{self.port}-")

    def log_folders(self) -> set[Path]:
        """Where Ray keeps the logs of this cluster."""
        words = [word for each in self.processes() for word in each.command.replace("=", " ").split()]
        found = (word.partition("/session_") for word in words if "/session_" in word and word.startswith("/"))
        return {Path(f"{before}/session_{name.partition('/')[0]}", "logs") for before, _, name in found}

    def until(self, holds: Callable[[], object]) -> None:
        """Fail with what it said where it never does."""
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline, self._told[-3000:]
            time.sleep(0.1)

    def until_ready(self) -> None:
        """Begin once more where Ray had too little of the machine to begin."""
        self.until(self._has_come_up_or_ended)
        if self.process.poll() is not None and RAYS_HASTE in self._told:
            self.process = self._begun()
            self.until(self._has_come_up_or_ended)
        assert self.process.poll() is None, self._told[-3000:]

    def _has_come_up_or_ended(self) -> bool:
        return self.process.poll() is not None or "Ready on" in self._told

    @property
    def _told(self) -> str:
        return self.said.read_text(errors="replace")

    def until_a_worker_runs(self) -> None:
        """From then on Ray has started all of its own processes."""
        self.until(lambda: any(each.command.startswith("ray::Serve") for each in self.processes()))

    def start_anew(self) -> None:
        """End every process by SIGKILL, `serve_app up` among them, and begin once more in the same folder."""
        self.process.kill()
        self.process.wait()
        end_runs(f"{self.port}-")
        self.process = self._begun()
        self.until_ready()

    def end(self) -> None:
        """Whatever is left of it after a test that failed."""
        self.process.terminate()
        self.process.wait(TIMEOUT_S)
        self.until(lambda: not self.processes())


def content_of(port: int) -> dict[str, Any]:
    """The cluster file of this repository with one small replica, and nothing beside it that it would need."""
    content: dict[str, Any] = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text(encoding="utf-8"))
    content["http_options"]["port"] = port
    content["applications"][0]["deployments"][0]["user_config"]["max_open_requests"] = 1
    for application in content["applications"]:
        application["args"].pop("adapters", None)
        for deployment in application["deployments"]:
            deployment |= {"num_replicas": 1, "graceful_shutdown_timeout_s": 2}
    return content


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
