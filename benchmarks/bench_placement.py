"""What placement costs per request, and what it saves: documents that are asked again, on real engines without Ray.

    python -m benchmarks.bench_placement --model build/bench/bench-tiny --replicas 2

Every document is asked several times, each time with another question, in random order, so many requests at once.
Each policy gets fresh replicas, in one process on the same cores. Prints JSON: microseconds of a choice, and for each
policy cached prompt tokens, seconds, and tokens of prompts and completions per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from random import Random
from typing import Any, get_args

from serve_app.core.names import ModelRef
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest
from serve_app.router.placement import Placement, PlacementPolicy
from tests.flow.stack import running_stack
from tests.router.virtual_fleet import VirtualReplica

QUESTION_TOKENS = 16
MAX_ID = 1000
"""Token ids of prompts are below it, in any vocabulary."""


def prompts(number: int, *, num_tokens: int, times: int) -> list[list[int]]:
    """Return the token ids of each document so often, with a question of its own behind it."""
    random = Random(0)
    texts = [random.choices(range(3, MAX_ID), k=num_tokens) for _ in range(number)]
    asked = [[*text, *random.choices(range(3, MAX_ID), k=QUESTION_TOKENS)] for text in texts for _ in range(times)]
    random.shuffle(asked)
    return asked


def microseconds(policy: PlacementPolicy, asked: list[list[int]], num_replicas: int) -> float:
    """Return what a choice among so many replicas costs, the best of five rounds."""
    placement = Placement(policy)
    replicas = [VirtualReplica(f"replica-{number}", work=1) for number in range(num_replicas)]
    requests = [
        GenerationRequest(request_id="r", model=ModelRef(base="bench"), prompt=Prompt(parts=(tuple(ids),)))
        for ids in asked
    ]
    rounds = []
    for _ in range(5):
        begun = time.perf_counter()
        for request in requests:
            placement.begin().choose(request, replicas)
        rounds.append((time.perf_counter() - begun) / len(requests) * 1e6)
    return round(min(rounds), 1)


async def ask_all(policy: PlacementPolicy, asked: list[list[int]], arguments: argparse.Namespace) -> dict[str, Any]:
    gate, usages = asyncio.Semaphore(arguments.at_once), []
    changes = {"name": "bench", "path": arguments.model, "adapters": None, "threads": 1}
    async with running_stack(num_replicas=arguments.replicas, **changes, kv_cache_bytes=1 << 30) as stack:
        stack.fleet.placement.policy = policy

        async def ask(ids: list[int]) -> None:
            async with gate:
                body = {"model": "bench", "prompt": ids, "max_tokens": arguments.completion, "ignore_eos": True}
                answer = await stack.post({**body, "temperature": 0})
                usages.append(answer.raise_for_status().json()["usage"])

        await ask([5] * QUESTION_TOKENS)
        begun = time.perf_counter()
        await asyncio.gather(*map(ask, asked))
        seconds = time.perf_counter() - begun
    return {
        "cached_tokens": sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(sum(each["total_tokens"] for each in usages) / seconds),
        "us_per_choice": microseconds(policy, asked, arguments.replicas),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="builtin:demo")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--completion", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--policies", nargs="*", default=get_args(PlacementPolicy))
    arguments = parser.parse_args()
    logging.disable()  # of a line for each request
    asked = prompts(arguments.documents, num_tokens=arguments.tokens, times=arguments.times)
    for policy in arguments.policies:
        print(json.dumps({"policy": policy, **asyncio.run(ask_all(policy, asked, arguments))}), flush=True)


if __name__ == "__main__":
    main()
