"""`serve_app up`, `serve deploy` and `serve run` lead to one service: it answers alike, whoever accepts its clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.service import running_service
from serve_app.check.ray_environment import is_behind_haproxy
from serve_app.cli.environment import RUN_VARIABLE, environment
from serve_app.cli.processes import end_runs, processes_of_runs
from tests.cluster.started import REPOSITORY, TIMEOUT_S, Started, content_of, free_port

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process belongs to is told by /proc"),
]

BODY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
LONG = BODY | {"max_tokens": 1900, "ignore_eos": True, "stream": True}
OURS = ("content-type", "retry-after", "x-completions-dialect", "x-request-id", "cache-control")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, object]]:
    """What each way has led to, the first one of them the measure of the others."""
    return {}


@pytest.mark.parametrize("way", ["up", "serve run with the environment", "serve run without it", "serve deploy"])
def test_every_way_to_start_the_service_leads_to_the_same_answers(
    way: str, found: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    has_haproxy = is_behind_haproxy({}, {}) and way != "serve run without it"
    with WAYS[way](tmp_path) as url:
        found[way] = walked(url, has_haproxy=has_haproxy)
        commands = [each.command for each in processes_of_runs(f"{url.rpartition(':')[2]}-")]
        assert any("haproxy" in each for each in commands) == has_haproxy
        assert not [each for each in commands if ":Front" in each], "an entrance has no process"
    assert found[way] == next(iter(found.values()))


def walked(url: str, *, has_haproxy: bool) -> dict[str, object]:
    """What a client gets there, in what must not depend on the door."""
    with httpx.Client(base_url=url, timeout=60) as client:
        found: dict[str, Any] = {
            "completion": facts(client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})),
            "no model": facts(alone(client, BODY | {"model": "nemo"})),
            "stream": streamed(client),
            "no route": facts(client.get("/nowhere")),
            "health": facts(client.get("/health")),
        }
        for _ in range(50):  # one may be open at once
            with client.stream("POST", "/v1/completions", json=LONG) as held:
                if held.status_code == 200:
                    lines = held.iter_lines()  # kept: without it the connection is closed
                    next(lines)
                    found["full"] = facts(client.post("/v1/completions", json=BODY))
                    found["health of the full"] = facts(client.get("/health"))
                    break
            time.sleep(0.1)
        assert alone(client, BODY).status_code == 200, "the client has left, and its place is free again"
        large = client.get("/health", headers={"large": "x" * 20_000})
        assert large.status_code == (400 if has_haproxy else 200)
        found["health afterwards"] = facts(client.get("/health"))
    return found


def alone(client: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    """The answer to a request once no other is open: one that has just been answered counts for an instant more."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        answer = client.post("/v1/completions", json=body)
        if answer.status_code != 503 or time.monotonic() > deadline:
            return answer
        time.sleep(0.2)


def facts(answer: httpx.Response) -> tuple[object, ...]:
    """Status, headers of ours and body, without what differs from request to request."""
    body = answer.json()
    for name in ("id", "created", "system_fingerprint"):
        body.pop(name, None)
    if "error" in body:
        body = {name: body["error"][name] for name in ("type", "param", "code", "error_code")}
    headers = {name: answer.headers[name] for name in OURS if name in answer.headers}
    if answer.request.headers.get("x-request-id") is None:
        assert headers.pop("x-request-id")
    return answer.status_code, headers, json.dumps(body, sort_keys=True)


def streamed(client: httpx.Client) -> tuple[object, ...]:
    answer = alone(client, BODY | {"stream": True})
    *events, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    text = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
    return answer.status_code, answer.headers["content-type"], text, done


@contextmanager
def by_up(folder: Path) -> Iterator[str]:
    run = Started(folder)
    try:
        run.until_ready()
        yield run.url
    finally:
        run.end()


@contextmanager
def by_run(has_environment: bool, folder: Path) -> Iterator[str]:
    """`serve run`, in the environment that `serve_app env` prints or in none of ours."""
    port, file = a_file(folder)
    run = f"{port}-by-hand"
    base = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    base |= {RUN_VARIABLE: run, "PYTHONPATH": str(REPOSITORY), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with (folder / "said.txt").open("wb") as said:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("serve")), "run", str(file)],
            env=environment(base, has_haproxy=is_behind_haproxy({}, {})) if has_environment else base,
            cwd=folder,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        until_healthy(url, folder / "said.txt", process)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            end_runs(run)
    assert not processes_of_runs(run)


@contextmanager
def by_deploy(folder: Path) -> Iterator[str]:
    """`serve deploy` of the models onto a service that `up` has started without any, in a folder of its own."""
    with running_service() as service:
        content: dict[str, Any] = yaml.safe_load(service.file.read_text())
        content["applications"][0]["deployments"][0]["user_config"]["max_open_requests"] = 1
        models = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())["applications"][1:]
        content["applications"] += small(models)
        service.file.write_text(yaml.safe_dump(content, sort_keys=False))
        service.deploy_file()
        until_healthy(service.url, service.log, None)
        yield service.url


def a_file(folder: Path) -> tuple[int, Path]:
    port = free_port()
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(content_of(port)), encoding="utf-8")
    return port, file


def small(applications: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for application in applications:
        application["args"].pop("adapters", None)
        for deployment in application["deployments"]:
            deployment |= {"num_replicas": 1, "graceful_shutdown_timeout_s": 2}
    return applications


def until_healthy(url: str, said: Path, process: subprocess.Popen[bytes] | None) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        assert process is None or process.poll() is None, said.read_text(errors="replace")[-3000:]
        assert time.monotonic() < deadline, said.read_text(errors="replace")[-3000:]
        try:
            if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)


WAYS: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "up": by_up,
    "serve run with the environment": partial(by_run, True),
    "serve run without it": partial(by_run, False),
    "serve deploy": by_deploy,
}
