"""Two routers and two replicas on a real cluster: limits, refunds, a ledger that no kill -9 bends, canaries, an end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.cli.processes import listener_on, send
from serve_app.cli.screen import KEY_VARIABLES, URL_VARIABLE
from tests.cluster.clients import TENANTS
from tests.cluster.house import NUM_ASKED, House
from tests.cluster.kills import (
    NUM_BEHIND,
    ROUTER,
    Seen,
    asked_of,
    begun,
    in_numbers,
    kept,
    shown_by_replicas,
    with_kills,
    without_kills,
    wrong_now,
)
from tests.cluster.started import REPOSITORY
from tests.cluster.test_notebooks import check_that_it_runs
from tests.notebooks.execute import NOTEBOOKS, read, wants_keys

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process belongs to is told by /proc"),
]

CANARY = "kanarienvogel"
BODY = {"model": "demo", "prompt": f"{CANARY}-prompt", "max_tokens": 200, "ignore_eos": True}
WRONG: list[dict[str, Any]] = [
    BODY | {"model": f"{CANARY}-model"},
    BODY | {"model": f"demo:{CANARY}-adapter"},
    BODY | {"max_tokens": -2},
    BODY | {"prompt": f"{CANARY}-context " * 2000},
    BODY | {"regex": f"({CANARY}"},
    BODY | {"json_schema": {"type": f"{CANARY}-type"}},
    BODY | {"temperature": f"{CANARY}-temperature"},
    BODY | {f"{CANARY}_parameter": 1},
]
LIMIT = 64
LEASE = LIMIT // 8
"""All that routers may hold beyond what is asked for."""
AGREEMENT_S = 60.0
PUBLISHED = "demo:team-sql"
ACCOUNTS = "ServeReplica:router:Accounts"


@dataclass(frozen=True, slots=True)
class Town:
    house: House
    admin: str
    publisher: str
    keys: dict[str, str]


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    house, admin, keys = begun(tmp_path_factory.mktemp("town"))
    try:
        house.command("tenants", "add", "team", "--publishes", "demo:team-*")
        publisher = house.command("keys", "create", "team", "--scopes", "infer", "adapters:write")["key"]
        yield Town(house, admin, publisher, keys)
    finally:
        house.run.end()


def test_two_hundred_at_once_of_one_tenant_exceed_no_limit_by_more_than_a_lease(town: Town) -> None:
    house = town.house
    house.command("tenants", "add", "many", "--models", "demo", "--requests-per-minute", str(LIMIT))
    key = house.command("keys", "create", "many")["key"]
    house.check_known(key)

    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=200)
        body = {"model": "demo", "prompt": "Once", "max_tokens": 2}
        async with httpx.AsyncClient(base_url=house.run.url, timeout=120, limits=limits) as client:
            headers = {"authorization": f"Bearer {key}"}
            return await asyncio.gather(
                *(client.post("/v1/completions", json=body, headers=headers) for _ in range(200))
            )

    answers = asyncio.run(ask())
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert LIMIT - LEASE <= statuses[200] <= LIMIT + LEASE
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
    assert all(int(answer.headers["x-ratelimit-limit-requests"]) == LIMIT for answer in answers)


def test_what_a_client_that_leaves_had_reserved_is_there_again(town: Town) -> None:
    house = town.house
    house.command("tenants", "add", "few", "--models", "demo", "--max-in-flight", "2")
    key = house.command("keys", "create", "few")["key"]
    house.check_known(key)
    body = {"model": "demo", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=house.run.url, timeout=60) as client:

        def begins_and_leaves() -> bool:
            """False where the two who left before it are still counted: that takes the server a moment."""
            with client.stream("POST", "/v1/completions", json=body, headers=headers) as begun:
                assert begun.status_code in {200, 429}
                return begun.status_code == 200 and bool(next(begun.iter_lines()))

        for _ in range(3):
            house.run.until(begins_and_leaves)
        house.run.until(lambda: house.complete(key).status_code == 200)


def test_a_team_publishes_with_its_own_key_what_it_may(town: Town) -> None:
    house, key = town.house, town.publisher
    body = {"lora_name": PUBLISHED, "lora_path": str(REPOSITORY / "adapters" / "demo" / "pirate")}
    house.check_known(key)
    assert house.ask("POST", "/v1/load_lora_adapter", key, body | {"lora_name": "demo:sql"}).status_code == 403
    assert house.ask("POST", "/v1/load_lora_adapter", key, body | {"lora_path": "/etc"}).status_code == 403
    assert house.ask("POST", "/v1/load_lora_adapter", key, body).status_code == 200
    assert statuses_of_the_published(town) == {200}
    [event] = [each for each in house.command("events")["data"] if each["action"] == "publish adapter"]
    assert (event["subject"], event["details"]["by"]) == (PUBLISHED, "team")


def statuses_of_the_published(town: Town) -> set[int]:
    return {town.house.complete(town.publisher, PUBLISHED).status_code for _ in range(NUM_ASKED)}


@pytest.mark.parametrize("file", [each for each in NOTEBOOKS if wants_keys(read(each))], ids=lambda file: file.stem)
def test_a_notebook_about_tenants_runs(town: Town, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, town.house.run.url)
    monkeypatch.setenv(KEY_VARIABLES[0], town.admin)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    check_that_it_runs(file)
    assert {tenant["name"] for tenant in town.house.command("tenants", "list")["data"]}.isdisjoint(
        {"research", "bench"}
    )
    assert town.house.complete(town.keys["acme"]).status_code == 200, "it ends nothing that it did not start"


@pytest.mark.law("Exactly once")
def test_where_nothing_is_killed_and_nobody_leaves_every_token_is_in_a_row(town: Town) -> None:
    seen = asyncio.run(without_kills(town.house, town.keys, seconds=5))
    agree(town, seen)
    assert seen.heard.statuses.keys() == {"200"}
    assert all(each.usage for each in seen.heard.requests)
    ledger, shown = kept(town.house), shown_by_replicas(town.house, town.admin)
    assert {(replica, tenant) for replica, tenant in ledger.counted if tenant in TENANTS} == shown.keys()
    assert not any(ledger.unattributed[tenant].total() for tenant in TENANTS if tenant in ledger.unattributed)


@pytest.mark.law("Exactly once")
def test_whatever_is_killed_every_whole_answer_has_its_row_and_no_request_has_two(town: Town) -> None:
    """What no row explains is no more than what was cut off, left, or lost with who computed or answered it."""
    seen = asyncio.run(with_kills(town.house, town.keys, most=4, seconds=90, seed=1))
    assert len(seen.deaths) == 4
    agree(town, seen)
    held = [each for each in asked_of(town.house, seen) if each.usage and not each.may_lack_row and not each.repeats]
    assert len(held) >= NUM_BEHIND


def agree(town: Town, seen: Seen) -> None:
    """Routers bring rows and counts a moment later."""
    until = time.monotonic() + AGREEMENT_S
    while (wrong := wrong_now(town.house, town.admin, seen)) and time.monotonic() < until:
        time.sleep(0.5)
    assert wrong == [], in_numbers(town.house, seen)


def test_no_file_of_a_cluster_has_a_canary_and_a_repeat_is_one_request_at_any_router(town: Town) -> None:
    house = town.house
    house.command("tenants", "add", "birds", "--models", "demo", "demo:*")
    key = house.command("keys", "create", "birds")["key"]
    house.check_known(key)
    sessions = house.run.log_folders()
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


def test_what_a_team_published_is_in_the_store_for_whoever_comes_later(town: Town) -> None:
    """The test before has killed the replicas."""
    house = town.house
    for each in house.run.processes():
        if ROUTER in each.command or ACCOUNTS in each.command:
            assert send(each, signal.SIGKILL)

    def is_served() -> bool:
        with suppress(httpx.TransportError):  # of who was killed
            return statuses_of_the_published(town) == {200}
        return False

    house.run.until(is_served)
    assert house.ask("POST", "/v1/unload_lora_adapter", town.publisher, {"lora_name": "team-sql"}).status_code == 200
    assert statuses_of_the_published(town) == {404}, "no adapter is left"


def test_a_cluster_ends_with_the_process_that_started_it_however_that_ends(town: Town) -> None:
    """The last test of this town."""
    run = town.house.run
    assert run.processes()
    run.process.kill()
    run.until(lambda: not run.processes())
    assert listener_on(run.port) is None


def check_repeats(house: House, key: str) -> None:
    """More than both routers get by chance, some of them while the first is computed."""
    body = BODY | {"max_tokens": 40, "temperature": 1}
    headers = {"authorization": f"Bearer {key}", "idempotency-key": "once"}

    def ask(_: int) -> httpx.Response:
        answer = httpx.post(f"{house.run.url}/v1/completions", json=body, headers=headers, timeout=120)
        while answer.status_code == 503:  # a router takes one at a time here
            answer = httpx.post(f"{house.run.url}/v1/completions", json=body, headers=headers, timeout=120)
        return answer

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(16)))
    assert {each.status_code for each in answers} == {200}
    assert len({each.content for each in answers}) == 1
    assert sum("idempotency-replayed" not in each.headers for each in answers) == 1


def kill_among(house: House, headers: dict[str, str]) -> None:
    with httpx.stream(
        "POST", f"{house.run.url}/v1/completions", json=BODY | {"stream": True}, headers=headers, timeout=180
    ) as response:
        lines = response.iter_lines()
        next(lines)
        for each in house.run.processes():  # it runs on one of them
            if each.command.startswith("ray::ServeReplica:demo:Model"):
                os.kill(each.pid, signal.SIGKILL)
        assert [line for line in lines if line][-1] == "data: [DONE]", "it goes on at the replica that Serve starts"
