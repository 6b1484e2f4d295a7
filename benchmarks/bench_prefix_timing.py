"""Can a tenant tell by time which prompts another one has sent? python -m benchmarks.bench_prefix_timing [--pairs 120]

A real engine behind the HTTP application, in this process. A victim sends a prompt; an attacker then sends the same one
and another that nobody has sent, in random order, and times both. AUC is the share of pairs in which the one that was
sent before was answered sooner: 0.5 is a guess, 1 tells every time. It is measured across tenants, within one, and
across tenants of one cache group; beside it stands which share of an unsalted cache's hits is left within a tenant.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from serve_app.core.tenants import Identity, Tenant
from serve_app.deployments.logs import ACCESS_LOGGER
from serve_app.http.guard import Door
from tests.flow.stack import Stack, running_stack

BLOCK = 16
NUM_WORDS = 60
WARMUP = 5
SELDOM = 6
"""What tells every time needs fewer pairs."""
SETTINGS: dict[str, Any] = {"num_replicas": 1, "threads": 1}
GROUPS = {"grouped victim": "lab", "grouped attacker": "lab"}
PAIRS = {
    "across tenants": ("victim", "attacker"),
    "within one": ("one", "one"),
    "across tenants of a cache group": ("grouped victim", "grouped attacker"),
}


def as_named(key: str | None) -> Identity:
    return Identity(tenant=Tenant(name=key or "", cache_group=GROUPS.get(key or "")), key_id="key")


def prompt_of(rng: random.Random, *, num_words: int = NUM_WORDS) -> str:
    """Words that no other prompt begins with."""
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=4)) for _ in range(num_words))


def auc(sooner: Sequence[float], later: Sequence[float]) -> float:
    """How often one of the first is less than one of the second; ties count half (Mann and Whitney)."""
    wins = sum((a < b) + (a == b) / 2 for a in sooner for b in later)
    return wins / (len(sooner) * len(later))


async def ask(stack: Stack, prompt: str, tenant: str | None) -> tuple[float, int]:
    """Seconds until the first token, and how many tokens of the prompt were cached."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    response = await stack.post(body, key=tenant)
    took = time.perf_counter() - began
    return took, response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Seconds of the prompt that was sent before and of one that was not; hits of the first, and without any salt."""

    sent_s: float
    unsent_s: float
    hits: int
    unsalted_hits: int


async def trial(walled: Stack, unwalled: Stack, rng: random.Random, victim: str, attacker: str) -> Trial:
    sent, unsent = prompt_of(rng), prompt_of(rng)
    await ask(walled, sent, victim)
    times = {prompt: await ask(walled, prompt, attacker) for prompt in rng.sample([sent, unsent], 2)}
    await ask(unwalled, sent, None)
    unsalted = await ask(unwalled, sent, None)
    return Trial(sent_s=times[sent][0], unsent_s=times[unsent][0], hits=times[sent][1], unsalted_hits=unsalted[1])


async def measure(num_pairs: int) -> None:
    async with AsyncExitStack() as stacks:
        walled = await stacks.enter_async_context(running_stack(door=Door(identify=as_named), **SETTINGS))
        unwalled = await stacks.enter_async_context(running_stack(**SETTINGS))
        logging.getLogger("serve_app").setLevel(logging.WARNING)
        logging.getLogger(ACCESS_LOGGER).setLevel(logging.WARNING)
        rng = random.Random(0)
        for _ in range(WARMUP):
            await trial(walled, unwalled, rng, "warm", "warm")
        found: dict[str, list[Trial]] = {name: [] for name in PAIRS}
        for number in range(num_pairs):  # in turns, so that a busy moment of the machine is everybody's
            for name, (victim, attacker) in PAIRS.items():
                if name == next(iter(PAIRS)) or number % SELDOM == 0:
                    found[name].append(await trial(walled, unwalled, rng, victim, attacker))
    for name, trials in found.items():
        print(told(name, trials))


def told(name: str, trials: Sequence[Trial]) -> str:
    sent, unsent = [each.sent_s for each in trials], [each.unsent_s for each in trials]
    medians = [f"{median(each) * 1000:.1f} ms" for each in (sent, unsent)]
    hits, unsalted = sum(each.hits for each in trials), sum(each.unsalted_hits for each in trials)
    return (
        f"{name}, {len(trials)} pairs: AUC {auc(sent, unsent):.3f}; medians {medians[0]} where it was sent before,"
        f" {medians[1]} where not; {hits} tokens were cached, {hits / unsalted:.1%} of those without salts"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=120)
    asyncio.run(measure(parser.parse_args().pairs))
