"""Canaries through a real cluster: a replica is killed among them, and no file has one afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.test_keys import House, with_keys

pytestmark = pytest.mark.cluster

CANARY = "kanarienvogel"
BODY = {"model": "demo", "prompt": f"{CANARY}-prompt", "max_tokens": 200, "ignore_eos": True}
WRONG: list[dict[str, Any]] = [
    BODY | {"model": f"{CANARY}-model"},
    BODY | {"model": f"demo:{CANARY}-adapter"},
    BODY | {"max_tokens": 10**6},
    BODY | {"regex": f"({CANARY}"},
    BODY | {"json_schema": {"type": f"{CANARY}-type"}},
    BODY | {"temperature": f"{CANARY}-temperature"},
    BODY | {f"{CANARY}_parameter": 1},
]


def with_two_routers(content: dict[str, Any]) -> None:
    with_keys(content)
    content["applications"][0]["deployments"][0]["num_replicas"] = 2


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path, with_two_routers)
    yield made
    made.run.end()


def test_no_file_of_a_cluster_has_a_canary_and_a_repeat_is_one_request_at_any_router(house: House) -> None:
    house.command("tenants", "add", "acme", "--models", "demo", "demo:*")
    key = house.command("keys", "create", "acme")["key"]
    house.run.until_ready()
    house.run.until(lambda: house.complete(key).status_code == 200)
    sessions = {folder for each in house.run.processes() for folder in session_folders(each.command)}
    check_repeats(house, key)
    headers = {"authorization": f"Bearer {key}", "user-agent": f"{CANARY}-agent", "cookie": f"{CANARY}-cookie"}
    for body in WRONG:
        answer = httpx.post(f"{house.run.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code < 500, answer.text  # an unknown parameter is told and ignored
    httpx.post(f"{house.run.url}/v1/completions", json=BODY, headers={"x-api-key": f"sa-{CANARY}"}, timeout=60)
    kill_among(house, headers)
    logs = [file for folder in sessions for file in folder.rglob("*") if file.is_file()]
    assert len(logs) > 10
    for file in [*logs, *house.folder.iterdir()]:
        content = file.read_bytes()
        for secret in (CANARY.encode(), key[3:].encode()):
            place = content.find(secret)
            assert place < 0, (file, content[max(0, place - 300) : place + 100])


def check_repeats(house: House, key: str) -> None:
    """More than both routers get by chance, some of them while the first is computed."""
    body = BODY | {"max_tokens": 40, "temperature": 1}
    headers = {"authorization": f"Bearer {key}", "idempotency-key": "once"}

    def ask(_: int) -> httpx.Response:
        answer = httpx.post(f"{house.run.url}/v1/completions", json=body, headers=headers, timeout=120)
        while answer.status_code == 503:  # the proxy takes one at a time here
            answer = httpx.post(f"{house.run.url}/v1/completions", json=body, headers=headers, timeout=120)
        return answer

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(16)))
    assert {each.status_code for each in answers} == {200}
    assert len({each.content for each in answers}) == 1
    assert sum("idempotency-replayed" not in each.headers for each in answers) == 1


def kill_among(house: House, headers: dict[str, str]) -> None:
    with httpx.stream(
        "POST", f"{house.run.url}/v1/completions", json=BODY | {"stream": True}, headers=headers, timeout=60
    ) as response:
        lines = response.iter_lines()
        next(lines)
        (model,) = (each for each in house.run.processes() if each.command.startswith("ray::ServeReplica:demo:Model"))
        os.kill(model.pid, signal.SIGKILL)
        assert any("error" in line for line in lines)


def session_folders(command: str) -> set[Path]:
    """Where Ray keeps the logs of the cluster that a process is of."""
    words = command.replace("=", " ").split()
    found = (word.partition("/session_") for word in words if "/session_" in word and word.startswith("/"))
    return {Path(f"{before}/session_{name.partition('/')[0]}", "logs") for before, _, name in found}
