"""Requests of two tenants through a running service whose routers and replicas are killed, and what the ledger knows.

    flock a-lock python -m tests.cluster.kills --seconds 360

Starts a service of its own with two routers and two replicas, kills one of them every few seconds by kill -9, and
prints JSON: how many died, what was asked, and whether the ledger, the replicas and the clients agree.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.house import House, with_keys
from tests.cluster.started import REPOSITORY

SPENT = ("prompt_tokens", "cached_tokens", "completion_tokens", "engine_ns")
TENANTS = ("acme", "beta")
CLIENTS = 6
VICTIMS = ("ServeReplica:router:Router", "ServeReplica:demo:Model")


def with_two_of_each(content: dict[str, Any]) -> None:
    with_keys(content)
    for application in content["applications"]:
        if application["name"] == "demo":
            application["args"]["adapters"] = str(REPOSITORY / "adapters" / "demo")
        for deployment in application["deployments"]:
            deployment["num_replicas"] = 2


@dataclass(slots=True)
class Seen:
    """What clients know. whole: completion tokens of answers that ended well, by request;  statuses: of all"""

    whole: dict[str, tuple[str, int]] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)


async def ask_for_ever(house: House, keys: dict[str, str], seen: Seen, number: int, is_over: asyncio.Event) -> None:
    """One client after the other: whole answers, streams, and some that leave before the end."""
    drawn, count = random.Random(number), 0
    while not is_over.is_set():
        tenant, count = drawn.choice(TENANTS), count + 1
        name, length = f"{tenant}-{number}-{count}", drawn.randint(1, 60)
        headers = {"authorization": f"Bearer {keys[tenant]}", "x-request-id": name}
        body = {"model": "demo", "prompt": f"Tell me of {count}", "max_tokens": length, "ignore_eos": True}
        patience_s = drawn.choice([60.0, 60.0, 60.0, 0.3])
        try:
            async with httpx.AsyncClient(base_url=house.run.url, timeout=patience_s) as client:
                answer = await client.post("/v1/completions", json=body, headers=headers)
            seen.statuses[str(answer.status_code)] += 1
            if answer.status_code == 200:
                seen.whole[name] = tenant, answer.json()["usage"]["completion_tokens"]
        except httpx.HTTPError as error:
            seen.statuses[type(error).__name__] += 1
        await asyncio.sleep(0.02)


def kill_one(house: House, drawn: random.Random) -> str | None:
    """By kill -9, a router or a replica; its kind, or None where the one that was drawn is not there just now."""
    kind = drawn.choice(VICTIMS)
    found = [each for each in house.run.processes() if kind in each.command]
    if len(found) < 2:
        return None
    os.kill(drawn.choice(found).pid, signal.SIGKILL)
    return kind.split(":")[-1]


async def with_kills(
    house: House, keys: dict[str, str], *, most: int, seconds: float, seed: int
) -> tuple[Seen, Counter[str]]:
    """What clients saw, and who was killed, until so many were or so much time has gone by."""
    seen, killed, is_over, drawn = Seen(), Counter[str](), asyncio.Event(), random.Random(seed)
    clients = [asyncio.create_task(ask_for_ever(house, keys, seen, each, is_over)) for each in range(CLIENTS)]
    until = time.monotonic() + seconds
    while killed.total() < most and time.monotonic() < until:
        await asyncio.sleep(drawn.uniform(0.5, 2.5))
        kind = await asyncio.to_thread(kill_one, house, drawn)
        killed.update([kind] if kind else [])
    await asyncio.sleep(1)
    is_over.set()
    await asyncio.gather(*clients)
    return seen, killed


def sums(folder: Path, question: str) -> dict[str, Counter[str]]:
    """By tenant, as the ledger's file has it. question: gives the tenant and then what is in SPENT"""
    with sqlite3.connect(folder / "kept.db") as connection:
        rows = connection.execute(question).fetchall()
    return {row[0]: Counter(dict(zip(SPENT, row[1:], strict=True))) for row in rows}


def ledger_of(folder: Path) -> dict[str, Counter[str]]:
    names = ", ".join(f"sum({name})" for name in SPENT)
    return sums(folder, f"select tenant, {names} from days group by tenant")


def counted_by(folder: Path) -> dict[str, Counter[str]]:
    names = ", ".join(f"sum({name})" for name in SPENT)
    return sums(folder, f"select flow, {names} from counted group by flow")


def num_rows(folder: Path, names: list[str]) -> Counter[str]:
    """Of each request, by the name that its client gave it."""
    with sqlite3.connect(folder / "kept.db") as connection:
        found = Counter(dict(connection.execute("select request_id, count(*) from ledger group by request_id")))
    return Counter({name: found[name] for name in names})


def told_by_replicas(house: House, admin: str) -> dict[tuple[str, str], int]:
    """Generated tokens by replica and flow, of the replicas that live, as a router shows them."""
    text = house.ask("GET", "/metrics", admin).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "serve_app_replica_flow_generated_tokens_total":
                found[sample.labels["replica"], sample.labels["flow"]] = int(sample.value)
    return found


def disagreements(house: House, admin: str, seen: Seen) -> list[str]:
    """What is wrong now; nothing, some seconds after the last request."""
    ledger, counted, nothing = ledger_of(house.folder), counted_by(house.folder), Counter[str]()
    wrong = []
    for tenant in TENANTS:
        if ledger.get(tenant, nothing) != counted.get(tenant, nothing):
            wrong.append(f"{tenant}: {ledger.get(tenant)} is not {counted.get(tenant)}")
        told = sum(tokens for whose, tokens in seen.whole.values() if whose == tenant)
        if told > ledger.get(tenant, nothing)["completion_tokens"]:
            wrong.append(f"{tenant} was told of {told} tokens")
    rows = num_rows(house.folder, list(seen.whole))
    wrong += [f"{name} has {number} rows" for name, number in rows.items() if number > 1]
    known = known_of(house.folder)
    for key, tokens in told_by_replicas(house, admin).items():
        if key[1] in TENANTS and known.get(key) != tokens:
            wrong.append(f"{key} generated {tokens}, and {known.get(key)} are known")
    return wrong


def known_of(folder: Path) -> dict[tuple[str, str], int]:
    """Generated tokens by replica and flow, as routers have told the ledger."""
    with sqlite3.connect(folder / "kept.db") as connection:
        found = connection.execute("select replica_id, flow, completion_tokens from counted").fetchall()
    return {(replica, flow): tokens for replica, flow, tokens in found}


def begun(folder: Path) -> tuple[House, str, dict[str, str]]:
    """A service that is ready, the key of an administrator, and those of the tenants."""
    house = House(folder, with_two_of_each, {"SERVE_APP_PROXY_MAX_REQUESTS": "512"})
    admin = house.command("keys", "create", "--admin")["key"]
    keys = {}
    for tenant in TENANTS:
        house.command("tenants", "add", tenant, "--models", "demo")
        keys[tenant] = house.command("keys", "create", tenant)["key"]
    house.run.until_ready()
    house.run.until(lambda: all(house.complete(key).status_code == 200 for key in keys.values()))
    return house, admin, keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--most", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        house, admin, keys = begun(Path(folder))
        try:
            seen, killed = asyncio.run(
                with_kills(house, keys, most=options.most, seconds=options.seconds, seed=options.seed)
            )
            until = time.monotonic() + 60
            while (wrong := disagreements(house, admin, seen)) and time.monotonic() < until:
                time.sleep(1)
            ledger = {tenant: dict(found) for tenant, found in ledger_of(house.folder).items()}
            told = {"killed": killed, "answers": seen.statuses, "ledger": ledger, "wrong": wrong}
            print(json.dumps(told, indent=1))
        finally:
            house.run.end()


if __name__ == "__main__":
    main()
