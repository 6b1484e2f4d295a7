"""Kills of replicas, routers or proxies under streams of many kinds: none may be lost or differ; how long they pause.

    python -m benchmarks.bench_failover --kills 20 --part replica
    python -m benchmarks.bench_failover --kills 5 --replicas 2 --engine vllm --python .venv-vllm/bin/python

Starts a service of its own with two routers, three replicas of the demo model, and a ledger. Clients in a closed loop
stream one kind each, ask again for a stream that broke off, and compare it with what it was before the first kill.
Prints JSON: streams, those that were asked for again, those that differed or were lost, what the ledger lacks or has
too much of, prompts that moved, and the pauses that the routers measured, seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.agreement import TOKENS, kept_in
from tests.cluster.house import House
from tests.cluster.kills import begun, with_two_of_each

NUM_ROUTERS = 2
PARTS = {"replica": "ray::ServeReplica:demo:", "router": "ray::ServeReplica:router:Router", "proxy": "haproxy"}
PATIENCE_S = 90.0
MAX_TOKENS = 400
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 5}
STORY, CHAT = {"prompt": "Once upon a time"}, {"messages": [{"role": "user", "content": "Tell me a story"}]}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {**STORY, "temperature": 0},
    "seeded": {**STORY, **SEEDED, "top_p": 0.95, "top_k": 40},
    "adapter": {**STORY, **SEEDED, "model": "demo:pirate"},
    "mix": {**STORY, **SEEDED, "model": "demo:pirate*0.5+shout*0.5"},
    "several": {**STORY, **SEEDED, "n": 3},
    "list": {**SEEDED, "prompt": ["Once upon a time", "The captain said", "A list of names"]},
    "penalties": {**STORY, **SEEDED, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "dry": {**STORY, **SEEDED, "dry_multiplier": 0.8},
    "mirostat": {**STORY, **SEEDED, "mirostat_mode": 2, "mirostat_tau": 3.0},
    "log-probabilities": {**STORY, **SEEDED, "logprobs": 2},
    "stops": {**STORY, **SEEDED, "stop": ["zzzz"], "min_tokens": 40},
    "regex": {**STORY, **SEEDED, "regex": "([a-z]+ ){150}end"},
    "echo": {**STORY, **SEEDED, "echo": True},
    "chat": {**CHAT, **SEEDED, "ignore_eos": True},
}


@dataclass(slots=True)
class Told:
    """What a stream says: texts and ends by choice, usage, and whether it came to its end."""

    response_id: str | None = None
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str | None] = field(default_factory=dict)
    tokens: tuple[int, int] | None = None
    is_done: bool = False
    error: str = ""

    def take(self, line: str) -> None:
        self.is_done = self.is_done or line == "data: [DONE]"
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
        self.response_id = event.get("id", self.response_id)
        self.error = self.error or str(event.get("error", ""))
        for choice in event.get("choices", ()):
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + piece
            self.ends[choice["index"]] = choice.get("finish_reason")
        usage = event.get("usage") or {}
        self.tokens = (usage["prompt_tokens"], usage["completion_tokens"]) if usage else self.tokens

    @property
    def whole(self) -> Any:
        return (self.texts, self.ends, self.tokens) if self.is_done and not self.error else None


@dataclass(slots=True)
class Seen:
    """Of all streams. usage: of the whole ones, by the names of their requests"""

    wrong: Counter[str] = field(default_factory=Counter)
    usage: dict[str, tuple[int, int]] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)


async def streamed(client: httpx.AsyncClient, asked: Mapping[str, Any], name: str, seen: Seen) -> Told:
    """A stream, from its beginning where it broke off; what has not begun is sent again."""
    body = {"model": "demo", "max_tokens": MAX_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    body |= asked
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    told, deadline = Told(), time.monotonic() + PATIENCE_S
    while not told.is_done and not told.error and time.monotonic() < deadline:
        begun, told = told.response_id, Told(response_id=told.response_id)
        way = ("POST", path) if begun is None else ("GET", f"{path}/{begun}")
        try:
            options = {"json": body} if begun is None else {}
            async with client.stream(*way, headers={"x-request-id": name}, **options) as response:
                if response.status_code != 200:
                    raise httpx.HTTPError(f"{way[0]} {response.status_code} {(await response.aread())[:120]!r}")
                async for line in response.aiter_lines():
                    told.take(line)
            reason = "no [DONE]"
        except httpx.HTTPError as error:
            reason = str(error) if type(error) is httpx.HTTPError else type(error).__name__
        if not told.is_done and not told.error:
            seen.again[f"{'before' if told.response_id is None else 'after'} its first event: {reason}"] += 1
            await asyncio.sleep(0.2)
    return told


async def measured(
    house: House, key: str, admin: str, *, kinds: Mapping[str, dict[str, Any]], part: str, kills: int, replicas: int
) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=house.run.url, timeout=300, limits=limits, headers=headers) as client:
        seen, is_over = Seen(), False
        right = {kind: await streamed(client, kinds[kind], f"undisturbed-{kind}", seen) for kind in kinds}

        async def one_after_another(kind: str) -> None:
            number = 0
            while not is_over:
                number, name = number + 1, f"{kind}-{number}"
                told = await streamed(client, kinds[kind], name, seen)
                if told.whole is not None and told.whole == right[kind].whole:
                    seen.usage[name] = told.tokens or (0, 0)
                else:
                    seen.wrong[f"{kind}: {told.error or ('another text' if told.is_done else 'lost')}"] += 1

        async with asyncio.TaskGroup() as group:
            for kind in kinds:
                group.create_task(one_after_another(kind))
            for number in range(kills):
                await until_full(house, admin, replicas)
                await asyncio.sleep(1.0)
                found = [
                    each
                    for each in house.run.processes()
                    if PARTS[part] in (each.program, each.command[: len(PARTS[part])])
                ]
                os.kill(found[number % len(found)].pid, signal.SIGKILL)
                await asyncio.sleep(1.0)
            await until_full(house, admin, replicas)
            is_over = True
        texts = await metrics_of_routers(client, admin)
    told = {"part": part, "kills": kills, "whole": len(seen.usage), "asked again": seen.again, "wrong": seen.wrong}
    return {**told, "ledger": await ledger_of(house, seen.usage), **pauses("".join(texts))}


async def metrics_of_routers(client: httpx.AsyncClient, admin: str) -> Iterable[str]:
    """Of each that lives; when it began to count tells it from the others."""
    found = {}
    for _ in range(8 * NUM_ROUTERS):
        text = (await client.get("/metrics", headers={"authorization": f"Bearer {admin}"})).text
        found[
            next((line for line in text.splitlines() if line.startswith("serve_app_") and "_created" in line), "")
        ] = text
    return found.values()


async def ledger_of(house: House, usage: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Streams whose rows do not add up to their usage, as soon as that does not change any more."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        kept = kept_in(house.store)
        sums = {name: sum(kept.rows.get(name, ()), Counter()) for name in usage}
        differ = {name: each for name, each in sums.items() if tuple(each[of] for of in TOKENS) != usage[name]}
        if not differ or time.monotonic() > deadline:
            return {"exact": len(usage) - len(differ), "differ": dict(list(differ.items())[:5])}
        await asyncio.sleep(1.0)


async def until_full(house: House, admin: str, replicas: int) -> None:
    """Until both routers know every replica."""
    good, deadline = 0, time.monotonic() + PATIENCE_S
    while good < 6 and time.monotonic() < deadline:
        try:
            live = await asyncio.to_thread(house.ask, "GET", "/live", admin)
            good = (
                good + 1
                if len(live.json()["replicas"]) == replicas and len(pids_of(house, "router")) == NUM_ROUTERS
                else 0
            )
        except (httpx.HTTPError, KeyError, ValueError):
            good = 0
        await asyncio.sleep(0.2)


def pids_of(house: House, part: str) -> list[int]:
    title = PARTS[part]
    return [each.pid for each in house.run.processes() if each.program == title or each.command.startswith(title)]


def pauses(text: str) -> dict[str, Any]:
    """Prompts that moved, and the upper ends of the buckets that half and 95 % of their pauses are in."""
    buckets: Counter[float] = Counter()
    moved = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            moved += sample.value if sample.name == "serve_app_moved_prompts_total" else 0
            if sample.name == "serve_app_move_pause_seconds_bucket":
                buckets[float(sample.labels["le"])] += int(sample.value)
    most = max(buckets.values(), default=0)
    ends = {f"p{q}_s": next((end for end in sorted(buckets) if buckets[end] >= most * q / 100), None) for q in (50, 95)}
    return {"moved": moved, **ends}


def with_engine(content: dict[str, Any], engine: str, python: str | None) -> None:
    """python: that has the engine, for the model's replicas"""
    model = content["applications"][1]
    model["args"]["engine"] = engine
    if python:
        options = {"runtime_env": {"py_executable": str(Path(python).absolute())}}
        model["deployments"][0].setdefault("ray_actor_options", {}).update(options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--part", choices=PARTS, default="replica")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--engine", default="own")
    parser.add_argument("--python", help="that has the engine")
    options = parser.parse_args()
    kinds = {name: asked for name, asked in KINDS.items() if options.engine == "own" or name != "mix"}

    def changed(content: dict[str, Any]) -> None:
        with_two_of_each(content)
        with_engine(content, options.engine, options.python)
        content["applications"][0]["deployments"][0]["num_replicas"] = NUM_ROUTERS
        content["applications"][1]["deployments"][0]["num_replicas"] = options.replicas

    with tempfile.TemporaryDirectory() as folder:
        house, admin, keys = begun(Path(folder), changed)
        try:
            how = {"kinds": kinds, "part": options.part, "kills": options.kills, "replicas": options.replicas}
            print(json.dumps(asyncio.run(measured(house, keys["acme"], admin, **how)), indent=1))
        finally:
            house.run.end()


if __name__ == "__main__":
    main()
