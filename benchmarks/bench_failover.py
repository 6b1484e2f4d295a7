"""What kills of model replicas cost streams of many kinds: none may be lost or differ, and how long they pause.

    python -m benchmarks.bench_failover --kills 20

Starts a service of its own with three replicas of the demo model. Clients in a closed loop stream one kind each, and
compare every stream with what it was before the first kill. Prints JSON: streams, those that differed or were cut,
prompts that moved, and the pauses that the router measured, seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections import Counter
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.service import Service, first_token, running_service

MODEL = {"name": "demo", "path": "builtin:demo", "adapters": "adapters/demo", "dtype": "float32"}
NUM_REPLICAS = 3
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


async def streamed(client: httpx.AsyncClient, kind: str) -> Any:
    """All that a stream of a kind says: texts by choice, ends and usage; what went wrong in their place."""
    body = {"model": "demo", "max_tokens": MAX_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    body |= KINDS[kind]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    texts: dict[int, str] = {}
    ends, tokens, is_done = {}, None, False
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                return f"{response.status_code} {(await response.aread())[:200]!r}"
            async for line in response.aiter_lines():
                is_done = is_done or line == "data: [DONE]"
                event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
                if "error" in event:
                    return f"error {event['error'].get('code')}"
                for choice in event.get("choices", ()):
                    piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    texts[choice["index"]] = texts.get(choice["index"], "") + piece
                    ends[choice["index"]] = choice.get("finish_reason")
                usage = event.get("usage") or {}
                tokens = (usage["prompt_tokens"], usage["completion_tokens"]) if usage else tokens
    except httpx.HTTPError as error:
        return f"{type(error).__name__}"
    return (texts, ends, tokens) if is_done else "ended without [DONE]"


async def measured(service: Service, *, kills: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=service.url, timeout=300, limits=limits) as client:
        right = {kind: await streamed(client, kind) for kind in KINDS}
        whole, wrong, is_over = 0, Counter[str](), False

        async def one_after_another(kind: str) -> None:
            nonlocal whole
            while not is_over:
                found = await streamed(client, kind)
                whole += found == right[kind]
                if found != right[kind]:
                    wrong[f"{kind}: {found if isinstance(found, str) else 'another text'}"] += 1

        async with asyncio.TaskGroup() as group:
            for kind in KINDS:
                group.create_task(one_after_another(kind))
            for _ in range(kills):
                await until(client, NUM_REPLICAS)
                await asyncio.sleep(1.0)
                os.kill(service.pids("ray::ServeReplica:demo:")[0], signal.SIGKILL)
                await asyncio.sleep(1.0)
            await until(client, NUM_REPLICAS)
            is_over = True
        text = (await client.get("/metrics")).text
    return {"kills": kills, "whole": whole, "wrong": dict(wrong), **pauses(text)}


async def until(client: httpx.AsyncClient, num_replicas: int) -> None:
    while len((await client.get("/live")).json()["replicas"]) != num_replicas:  # noqa: ASYNC110
        await asyncio.sleep(0.2)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    with running_service() as service:
        service.deploy(MODEL, scaling={"num_replicas": NUM_REPLICAS})
        first_token(service.url, "demo")
        print(json.dumps(asyncio.run(measured(service, kills=options.kills)), indent=1))


if __name__ == "__main__":
    main()
