"""Two routers and two replicas on a real cluster: limits of a tenant, refunds, and a ledger that no kill -9 bends."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.cluster.kills import begun, disagreements, ledger_of, with_kills
from tests.cluster.test_keys import House

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process belongs to is told by /proc"),
]

LIMIT = 64
LEASE = LIMIT // 8
"""All that routers may hold beyond what is asked for."""


@dataclass(frozen=True, slots=True)
class Town:
    house: House
    admin: str
    keys: dict[str, str]


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    house, admin, keys = begun(tmp_path_factory.mktemp("town"))
    yield Town(house, admin, keys)
    house.run.end()


def test_two_hundred_at_once_of_one_tenant_exceed_no_limit_by_more_than_a_lease(town: Town) -> None:
    house = town.house
    house.command("tenants", "add", "many", "--models", "demo", "--requests-per-minute", str(LIMIT))
    key = house.command("keys", "create", "many")["key"]
    house.run.until(lambda: house.ask("GET", "/v1/models", key).status_code == 200)

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
    house.run.until(lambda: house.ask("GET", "/v1/models", key).status_code == 200)
    body = {"model": "demo", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=house.run.url, timeout=60) as client:
        for _ in range(3):
            with client.stream("POST", "/v1/completions", json=body, headers=headers) as first:
                assert first.status_code == 200
                next(first.iter_lines())
        house.run.until(lambda: house.complete(key).status_code == 200)


def test_whatever_is_killed_the_ledger_has_what_replicas_counted_and_no_row_twice(town: Town) -> None:
    seen, killed = asyncio.run(with_kills(town.house, town.keys, most=4, seconds=90, seed=1))
    assert killed.total() == 4
    assert seen.whole
    town.house.run.until(lambda: not disagreements(town.house, town.admin, seen))
    assert ledger_of(town.house.folder)["acme"]["completion_tokens"] > 0
