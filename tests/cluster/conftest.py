"""One Ray Serve cluster for the whole session, running the applications of the real cluster file."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from serve_app.check.ray_environment import is_behind_haproxy
from serve_app.cli.environment import environment

REPOSITORY = Path(__file__).parents[2]
READY_TIMEOUT_S = 180.0
LEASE_S = 4.0
"""How long a replica keeps the requests of a router that it does not hear of; shorter than in the cluster file."""

CHANGES = {
    "Router": {"graceful_shutdown_timeout_s": 2, "graceful_shutdown_wait_loop_s": 0.1},
    "Model": {"graceful_shutdown_timeout_s": 2, "graceful_shutdown_wait_loop_s": 0.1, "health_check_period_s": 1},
}
"""What tests must not wait for."""


@pytest.fixture(scope="session", autouse=True)
def alone(request: pytest.FixtureRequest) -> None:
    """Whatever else runs takes time from the cluster, and the tests would blame the service."""
    if hasattr(request.config, "workerinput"):
        pytest.fail("a cluster is tested beside nothing else: leave out --numprocesses, or add -m 'not cluster'")


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """The address of the service, ready."""
    temporary = tempfile.mkdtemp(prefix="serve-")  # short: the path of a unix socket is below it
    before = Path.cwd()
    os.chdir(REPOSITORY)  # the cluster file names its adapters relative to here
    changes = pytest.MonkeyPatch()
    for name, value in environment(os.environ, has_haproxy=is_behind_haproxy({}, os.environ)).items():
        changes.setenv(name, value)  # as `serve_app up` starts its clusters
    try:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=150 * 1024 * 1024,
            _temp_dir=temporary,
        )
        port = _free_port()
        _deploy(port)
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url)
        yield url
        serve.shutdown()
    finally:
        ray.shutdown()
        changes.undo()
        os.chdir(before)
        shutil.rmtree(temporary, ignore_errors=True)


def _deploy(port: int) -> None:
    content: dict[str, Any] = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text(encoding="utf-8"))
    for application in content["applications"]:
        if application["name"] != "router":
            application["args"] |= {"lease_s": LEASE_S, "return_hidden_states": True}
        for deployment in application["deployments"]:
            deployment |= CHANGES[deployment["name"]]
    config = ServeDeploySchema.model_validate(content)
    serve.start(http_options={**content["http_options"], "port": port}, proxy_location="HeadOnly")
    from ray.serve.context import _get_global_client  # what `serve run` does with a file has no public name

    _get_global_client().deploy_apps(config, _blocking=False)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    said = ""
    while time.monotonic() < deadline:
        try:
            response = httpx.get(f"{url}/health", timeout=60)
            if response.status_code == 200 and _is_complete():
                return
            said = response.text
        except httpx.HTTPError as error:
            said = repr(error)
        _raise_if_failed()
        time.sleep(0.2)
    raise TimeoutError(f"the service did not become ready: {said}")


def _is_complete() -> bool:
    """Whether every replica runs; the service itself is ready with fewer."""
    return all(application.status == "RUNNING" for application in serve.status().applications.values())


def _raise_if_failed() -> None:
    for name, application in serve.status().applications.items():
        messages = [application.message, *(each.message for each in application.deployments.values())]
        if application.status == "DEPLOY_FAILED":
            raise RuntimeError(f"{name} cannot be deployed: " + "\n".join(messages)[-1500:])
