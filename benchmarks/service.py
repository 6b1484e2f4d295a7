"""Starts the service as its users do, `serve_app up FILE`, on free ports, deploys to it, and ends it again."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from serve_app.cli.environment import environment
from serve_app.cli.processes import processes_of_runs

REPOSITORY = Path(__file__).parents[1]
UP_TIMEOUT_S = 240.0
MODEL_TIMEOUT_S = 600.0
END_TIMEOUT_S = 120.0
POLL_S = 0.25
ONE_REPLICA: Mapping[str, Any] = MappingProxyType({"num_replicas": 1})
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
RAYS_LOG = re.compile(r"what Ray says is in (\S+)")
DASHBOARD = re.compile(r"dashboard at (?:\x1b\[[\d;]*m)*(?:http://)?([\d.]+:\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running cluster of its own.

    url: of its HTTP;  file: its cluster file;  log: what `serve_app up` printed
    """

    url: str
    file: Path
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def deploy(
        self,
        *models: dict[str, Any],
        beside: Items[dict[str, Any]] = (),
        num_routers: int = 1,
        scaling: Mapping[str, Any] = ONE_REPLICA,
    ) -> None:
        """Serve these models and no others; returns as soon as that was asked for.

        models: the `args` of each;  beside: further applications, whole;  scaling: of each model's deployment
        """
        write_cluster_file(self.file, self.port, models, beside=beside, num_routers=num_routers, scaling=scaling)
        self.deploy_file()

    def deploy_file(self) -> None:
        """Have the service take over its file as it is."""
        self._run("serve", "deploy", "--address", f"http://{self._dashboard}", str(self.file))

    def pids(self, title: str) -> list[int]:
        """Its processes whose titles start so, or which run the program of that name."""
        found = processes_of_runs(f"{self.port}-")
        return [each.pid for each in found if each.command.startswith(title) or each.program == title]

    def replica_pid(self, model: str) -> int:
        """The process of the model's only replica."""
        found = self.pids(f"ray::ServeReplica:{model}:")
        assert len(found) == 1, f"{len(found)} replicas of {model}"
        return found[0]

    @property
    def _dashboard(self) -> str:
        said = self.log.read_text()
        rays = RAYS_LOG.search(said)
        assert rays is not None, f"no log of Ray's in {said}"
        found = DASHBOARD.search(Path(rays[1]).read_text())
        assert found is not None, f"no dashboard in {rays[1]}"
        return found[1]

    def _run(self, *command: str) -> None:
        script = Path(sys.executable).with_name(command[0])
        subprocess.run(
            [str(script), *command[1:]],
            check=True,
            env=environment(_environment(), has_haproxy=True),  # Ray's ports want the token that `up` has made
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=REPOSITORY,
        )


@contextmanager
def running_service(*, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[Service]:
    """A cluster with the router and no model yet, until the block ends.

    settings: of the environment, beside this process's own
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        port = free_port()
        service = Service(url=f"http://127.0.0.1:{port}", file=Path(scratch) / "cluster.yaml", log=Path(scratch) / "up")
        write_cluster_file(service.file, port, ())
        command = [
            sys.executable,
            "-m",
            "serve_app",
            "up",
            "--dashboard",
            str(service.file),
        ]
        with service.log.open("wb") as log:
            process = subprocess.Popen(
                command, env=_environment() | dict(settings), cwd=REPOSITORY, stdout=log, stderr=log
            )
        signal.signal(signal.SIGTERM, _leave)
        try:
            _wait_until_answering(service, process)
            yield service
        finally:
            _end(process, service)


def write_cluster_file(
    file: Path,
    port: int,
    models: Items[dict[str, Any]],
    *,
    beside: Items[dict[str, Any]] = (),
    num_routers: int = 1,
    scaling: Mapping[str, Any] = ONE_REPLICA,
) -> None:
    """The repository's own cluster file with these models instead of its own.

    beside: further applications, whole;  scaling: members of each model's deployment
    """
    content: dict[str, Any] = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text(encoding="utf-8"))
    content["http_options"]["port"] = port
    router, template = content["applications"][0], content["applications"][-1]
    for each in router, template:
        each["deployments"][0]["graceful_shutdown_timeout_s"] = 2
    del template["deployments"][0]["num_replicas"]
    template["deployments"][0] |= scaling
    router["deployments"][0]["num_replicas"] = num_routers
    served = [template | {"name": args["name"], "args": args} for args in models]
    content["applications"] = [router, *served, *beside]
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def first_token(url: str, model: str, *, timeout_s: float = MODEL_TIMEOUT_S) -> float:
    """Ask for a completion of one token until one comes; returns when that was, on the monotonic clock."""
    body = {"model": model, "prompt": [11, 12, 13], "max_tokens": 1, "temperature": 0}
    deadline = time.monotonic() + timeout_s
    said: object = None
    while time.monotonic() < deadline:
        try:
            post(url, body)
            return time.monotonic()
        except (urllib.error.URLError, OSError) as error:
            said = error
            time.sleep(POLL_S)
    raise TimeoutError(f"{model} gives no token: {said}")


def post(url: str, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    """The parsed answer. Raises what urllib raises."""
    parsed: dict[str, Any] = json.loads(read(url + path, body))
    return parsed


def read(address: str, body: dict[str, Any]) -> bytes:
    """The answer's bytes, events too. Raises what urllib raises."""
    request = urllib.request.Request(
        address, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: bytes = response.read()
        return answer


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY)}


def _wait_until_answering(service: Service, process: subprocess.Popen[bytes]) -> None:
    """Until the router lists models, though there is none: `/health` waits for one."""
    deadline = time.monotonic() + UP_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{service.url}/v1/models", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise RuntimeError(f"the service did not start: {service.log.read_text()}")


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _end(process: subprocess.Popen[bytes], service: Service) -> None:
    """As Ctrl-C does, and `serve_app down` where that took too long."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        subprocess.run([sys.executable, "-m", "serve_app", "down", str(service.file)], env=_environment(), check=False)
        process.wait()
