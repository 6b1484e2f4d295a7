"""Traces for tests, and a service whose steps cost round sums."""

from __future__ import annotations

from random import Random

from serve_app.engine.config import EngineConfig
from serve_app.whatif.costs import StepCosts
from serve_app.whatif.simulation import Service
from serve_app.whatif.trace import Asked

COSTS = StepCosts(steps=0.01, prompt_tokens=0.0005, rows=0.0008, request_s=0.005, num_blocks=4096)


def service(**changes: object) -> Service:
    config = {"name": "tiny", "path": "", **changes}
    return Service(config=EngineConfig(**config), costs=COSTS)  # type: ignore[arg-type]


def documents(number: int, *, times: int, per_s: float, num_tokens: int = 2000, seed: int = 0) -> list[Asked]:
    """Each of so many documents asked so often, with a question of its own behind it, in random order."""
    random, at_s, trace = Random(seed), 0.0, []
    order = [document for document in range(number) for _ in range(times)]
    random.shuffle(order)
    for at, document in enumerate(order):
        at_s += random.expovariate(per_s)
        pieces = ((f"document {document}", num_tokens), (f"question {at}", 16))
        trace.append(Asked(at_s=at_s, output_tokens=16, pieces=pieces))
    return trace


def adapters(number: int, *, of: int, per_s: float, seed: int = 0) -> list[Asked]:
    """Requests to adapters, a few of which are asked for often."""
    random, at_s, trace = Random(seed), 0.0, []
    for at in range(number):
        at_s += random.expovariate(per_s)
        name = f"tiny:a{int(random.paretovariate(0.8)) % of}"
        trace.append(Asked(at_s=at_s, output_tokens=8, pieces=((f"own {at}", 32),), model=name))
    return trace
