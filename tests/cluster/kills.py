"""Requests of two tenants through a running service whose routers and replicas are killed, and what the ledger knows.

    flock a-lock python -m tests.cluster.kills --seconds 360

Starts a service of its own with two routers and two replicas, kills one of them every few seconds by kill -9, and
prints JSON: how many died, what was asked, and whether the ledger, the replicas and the clients agree.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serve_app.cli.processes import Process, send
from serve_app.core.ledger import CLIENT_LEFT
from serve_app.router.ledger_writer import FLUSH_S
from tests.agreement import SPENT, TOKENS, Asked, Kept, disagreements, kept_in, unexplained
from tests.cluster.clients import PATIENCE_S, TENANTS, Heard, Request, clients
from tests.cluster.house import House, with_keys
from tests.cluster.started import REPOSITORY

ROUTER, REPLICA = "ServeReplica:router:Router", "ServeReplica:demo:Model"
NUM_BEHIND = 10
"""Answers, at least, of routers that were not killed."""
BROUGHT_S = 10 * FLUSH_S
"""Within so long a router has brought a row. One that dies later did, or has lost it for no reason."""
TOLD_S = 10.0
"""Within so long every router that lives has asked every replica that lives what it spent, many times over."""
SHOWN = {
    "serve_app_replica_flow_generated_tokens_total": ("completion_tokens", 1),
    "serve_app_replica_flow_seconds_total": ("engine_ns", 10**9),
}


def with_two_of_each(content: dict[str, Any]) -> None:
    with_keys(content)
    content["applications"][0]["deployments"][0]["user_config"]["max_open_requests"] = 512
    for application in content["applications"]:
        if application["name"] == "demo":
            application["args"]["adapters"] = str(REPOSITORY / "adapters" / "demo")
        for deployment in application["deployments"]:
            deployment["num_replicas"] = 2


@dataclass(slots=True)
class Seen:
    """What clients heard, and who was killed: when, of what kind, and its process."""

    heard: Heard
    deaths: list[tuple[float, str, int]] = field(default_factory=list)

    @property
    def num_whole(self) -> int:
        return sum(each.usage is not None for each in self.heard.requests)

    @property
    def killed(self) -> Counter[str]:
        return Counter(kind.split(":")[-1] for _, kind, _ in self.deaths)

    def asked(self, logged: Mapping[str, Logged]) -> list[Asked]:
        """logged: by routers, of requests that they were done with"""
        return [self._asked(each, logged.get(each.name)) for each in self.heard.requests]

    def _asked(self, request: Request, logged: Logged | None) -> Asked:
        """What no router logged was of one that died, or no router had it. Who answers has noticed before who died;
        that a client has left, a router may notice later.
        """
        late_s = TOLD_S if request.has_left else 0.0
        pid = None if logged is None else logged.pid
        return Asked(
            name=request.name,
            tenant=request.tenant,
            most=request.most,
            usage=request.usage,
            repeats=request.repeats,
            was_taken=self._num_dead(ROUTER, request, late_s) > 0 if logged is None else logged.was_taken,
            num_lost=self._num_dead(REPLICA, request, late_s),
            may_lack_row=self._num_dead(ROUTER, request, BROUGHT_S, pid=pid) > 0,
            may_be_uncounted=self._num_dead(REPLICA, request, TOLD_S) > 0,
        )

    def _num_dead(self, kind: str, request: Request, late_s: float, *, pid: int | None = None) -> int:
        """Of this kind, those that died while it ran or so soon after; pid: that one alone"""
        until = request.ended_at + late_s
        return sum(
            kind == its_kind and request.began_at <= at <= until and pid in (None, its_pid)
            for at, its_kind, its_pid in self.deaths
        )


@dataclass(frozen=True, slots=True)
class Logged:
    """What a router's line says of a request. pid: the router's process;  was_taken: whether a replica may have it"""

    pid: int
    was_taken: bool


def kill_one(house: House, drawn: random.Random) -> tuple[float, str, int] | None:
    """By kill -9, a router or a replica of this house; None where the one that was drawn is not there just now."""
    kind = drawn.choice([ROUTER, REPLICA])
    found = [each for each in house.run.processes() if kind in each.command]
    if len(found) < 2:
        return None
    victim: Process = drawn.choice(found)
    at = time.monotonic()
    return (at, kind, victim.pid) if send(victim, signal.SIGKILL) else None


async def with_kills(house: House, keys: dict[str, str], *, most: int, seconds: float, seed: int) -> Seen:
    """Until so many were killed or so much time has gone by, and then some answers more of who lives on."""
    seen, drawn = Seen(Heard(f"killed-{seed}")), random.Random(seed)
    async with clients(house.run.url, keys, seen.heard, share_leaving=0.25):
        until = time.monotonic() + seconds
        while len(seen.deaths) < most and time.monotonic() < until:
            await asyncio.sleep(drawn.uniform(0.5, 2.5))
            death = await asyncio.to_thread(kill_one, house, drawn)
            seen.deaths += [death] if death else []
        num_whole, until = seen.num_whole, time.monotonic() + PATIENCE_S
        while seen.num_whole < num_whole + 2 * NUM_BEHIND and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return seen


async def without_kills(house: House, keys: dict[str, str], *, seconds: float) -> Seen:
    """Nobody leaves, either."""
    seen = Seen(Heard("calm"))
    async with clients(house.run.url, keys, seen.heard, share_leaving=0.0):
        await asyncio.sleep(seconds)
    return seen


def kept(house: House) -> Kept:
    return kept_in(house.store)


def logged_in(folders: Collection[Path]) -> dict[str, Logged]:
    """By the name of each request that a router was done with. Of who left it may not know that a replica took it."""
    found = {}
    for file in (file for folder in folders for file in folder.glob("worker-*.err")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if '"event":"completion"' in line:
                facts, pid = json.loads(line), int(file.stem.rpartition("-")[2])
                was_taken = "response_id" in facts or facts["status"] == CLIENT_LEFT
                found[facts["request_id"]] = Logged(pid, was_taken)
    return found


def shown_by_replicas(house: House, admin: str) -> dict[tuple[str, str], dict[str, int]]:
    """What living replicas spent, by replica and tenant, as a router shows it: not what it tells the ledger."""
    text = house.ask("GET", "/metrics", admin).text
    found: dict[tuple[str, str], dict[str, int]] = {}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        if sample.name in SHOWN and sample.labels["flow"] in TENANTS:
            name, scale = SHOWN[sample.name]
            amounts = found.setdefault((sample.labels["replica"], sample.labels["flow"]), {})
            amounts[name] = round(sample.value * scale)
    return found


def asked_of(house: House, seen: Seen) -> list[Asked]:
    return seen.asked(logged_in(house.run.log_folders()))


def wrong_now(house: House, admin: str, seen: Seen) -> list[str]:
    """Nothing, some seconds after the last request."""
    return disagreements(kept(house), asked_of(house, seen), shown_by_replicas(house, admin))


def in_numbers(house: House, seen: Seen) -> dict[str, object]:
    """How much of everything there was that could have been wrong."""
    ledger, asked = kept(house), asked_of(house, seen)
    whole = [each for each in asked if each.usage]
    own = [each for each in whole if not each.repeats]
    most = [unexplained(ledger, each) for each in asked]
    return {
        "killed": seen.killed,
        "answers": seen.heard.statuses,
        "whole": len(whole),
        "of these given again": len(whole) - len(own),
        "of these without a row": sum(ledger.row(each.name) is None for each in own),
        "of these held to have one": sum(not each.may_lack_row for each in own),
        "not whole with a row": sum(not each.usage and ledger.row(each.name) is not None for each in asked),
        "ledger": {tenant: {name: ledger.days[tenant][name] for name in SPENT} for tenant in TENANTS},
        "unattributed": {tenant: ledger.unattributed.get(tenant, {}) for tenant in TENANTS},
        "explained at most": dict(zip(TOKENS, map(sum, zip(*most, strict=True)), strict=True)),
    }


def begun(
    folder: Path,
    change: Callable[[dict[str, Any]], object] = with_two_of_each,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[House, str, dict[str, str]]:
    """A service that is ready, the key of an administrator, and those of the tenants."""
    house = House(folder, change, environment)
    try:
        admin = house.command("keys", "create", "--admin")["key"]
        keys = {}
        for tenant in TENANTS:
            house.command("tenants", "add", tenant, "--models", "demo", "demo:*")
            keys[tenant] = house.command("keys", "create", tenant)["key"]
        house.run.until_ready()
        house.run.until(lambda: all(house.complete(key).status_code == 200 for key in keys.values()))
    except BaseException:
        house.run.end()
        raise
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
            seen = asyncio.run(with_kills(house, keys, most=options.most, seconds=options.seconds, seed=options.seed))
            until = time.monotonic() + 60
            while (wrong := wrong_now(house, admin, seen)) and time.monotonic() < until:
                time.sleep(1)
            told = {
                "killed": seen.killed,
                "answers": seen.heard.statuses,
                **in_numbers(house, seen),
                "wrong": wrong,
            }
            print(json.dumps(told, indent=1))
        finally:
            house.run.end()


if __name__ == "__main__":
    main()
