"""How cost grows with what there is to do, one quantity after the other; fits exponents and draws the curves.

    python -m benchmarks.bench_scale --model scratch/bench/bench-tiny --plots scratch/plots

Steps against rows, context, adapters in the bank, adapters in the batch, and vocabulary; the router against streams;
the time and the memory that loading takes against the size of the weights. An exponent is of
cost = fixed + slope * quantity ** exponent. What grows faster than in proportion is named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench_router, figures
from benchmarks.bench_engine import HERE, STEPS, Worker, make_adapters, workers
from benchmarks.bench_router import ROUTER
from benchmarks.engine_cases import MANY, Case, decode
from benchmarks.fits import Fit, fit
from benchmarks.plots import curves
from serve_app.core.request import SamplingParams
from serve_app.engine.sampling.sampler import Sampler
from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.engine.sampling_reference import row
from tests.fakes import FakeBackend

SWEEPS: dict[str, dict[int, Case]] = {
    "rows": {rows: decode(rows) for rows in (1, 2, 4, 8, 16, 32, 64)},
    "context": {context: decode(8, context) for context in (256, 512, 1024, 2048, 4096, 8192)},
    "adapters in the bank": {count: decode(16, adapters=8, resident=count) for count in (8, 16, 32, MANY)},
    "adapters in the batch": {count: decode(MANY, adapters=count) for count in (1, 2, 4, 8, 16, 32, MANY)},
}
VOCABULARIES = (8192, 32768, 65536, 131072, 262144)
SAMPLED_ROWS = 8
STREAMS = (1, 4, 16, 64, 256)
NUM_STREAMED = 32
"""Tokens of each stream."""
COLUMNS = ("quantity", "from", "to", "cost", "exponent", "fixed", "error", "bends")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """points: what there was to do, and the cost; the best of the rounds, in which all points take turns"""

    quantity: str
    unit: str
    points: list[tuple[float, float]]

    @property
    def fit(self) -> Fit:
        return fit([x for x, _ in self.points], [y for _, y in self.points])


def step_curves(worker: Worker, *, rounds: int) -> Iterator[Curve]:
    """CPU time of a step, all threads together: what others do on the machine is not in it."""
    for quantity, cases in SWEEPS.items():
        best: dict[int, float] = {}
        for _ in range(rounds):
            for amount, case in cases.items():
                cost = worker.ask({"case": case.told(), "steps": STEPS})["cpu_ms"]
                best[amount] = min(cost, best.get(amount, cost))
        yield Curve(quantity=quantity, unit="CPU ms per step", points=sorted(best.items()))


def vocabulary_curve(*, rounds: int) -> Curve:
    """Of the sampler alone, on rows that truncate; the head's product is one of the model's."""
    sampler, draw = Sampler(), torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
    best: dict[int, float] = {}
    for _ in range(rounds):
        for size in VOCABULARIES:
            logits = torch.randn(SAMPLED_ROWS, size, generator=draw) * 4.2
            rows = [row(params) for _ in range(SAMPLED_ROWS)]
            begun = time.process_time()
            sampler.choose(logits, rows)
            spent = (time.process_time() - begun) * 1e3
            best[size] = min(spent, best.get(size, spent))
    return Curve(quantity="vocabulary", unit=f"CPU ms to sample {SAMPLED_ROWS} rows", points=sorted(best.items()))


def router_curve(*, rounds: int) -> Curve:
    """Of the router alone: what a step's frame of one token for each stream costs it, from frame to bytes."""
    told = asyncio.run(router_figures(STREAMS, rounds=rounds))
    points = [(float(count), told[count]["router_us_per_token"] * count / 1e3) for count in STREAMS]
    return Curve(quantity="streams", unit="CPU ms of the router per step", points=points)


async def router_figures(amounts: Items[int], *, rounds: int) -> dict[int, dict[str, float]]:
    """By the number of streams, the best of the rounds; microseconds."""
    backend = FakeBackend(is_stepped=True)
    fleet = Fleet(ROUTER)
    fleet.put(await backend.hello(ROUTER), backend)
    app = build_app(Router(fleet))
    best: dict[int, dict[str, float]] = {}
    for _ in range(rounds + 1):  # the first warms up, and is no better than the others
        for count in amounts:
            told = await bench_router.measure(app, backend, count, NUM_STREAMED)
            best[count] = {name: min(value, best.get(count, told)[name]) for name, value in told.items()}
    await fleet.close()
    return best


def loading_curves(models: list[Path], *, threads: int) -> Iterator[Curve]:
    """Seconds of CPU until an engine is ready, and the memory that it holds more than an empty process, by weights."""
    by_size: dict[float, dict[str, float]] = {}
    for model in models:
        with workers([HERE], {"settings": settings(model, threads, 1), "adapters": {}}) as (worker,):
            by_size[sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e6] = worker.loading
    for name, unit in (("cpu_s", "CPU s to load"), ("memory_mb", "MB held")):
        points = sorted((size, told[name]) for size, told in by_size.items())
        yield Curve(quantity=f"weights, {name}", unit=unit, points=points)


def settings(model: Path, threads: int, max_adapters: int) -> dict[str, Any]:
    return {
        "name": "bench", "path": str(model.resolve()), "dtype": "float32", "threads": threads,
        "max_num_sequences": MANY, "max_batch_tokens": 1024, "kv_cache_bytes": 2 << 30, "max_adapters": max_adapters,
    }  # fmt: skip


def told_of(curve: Curve) -> dict[str, Any]:
    (least, first), (most, last), found = curve.points[0], curve.points[-1], curve.fit
    return {
        "quantity": curve.quantity, "from": least, "to": most, "exponent": found.exponent if found.slope else 0.0,
        "cost": f"{figures.shown(float(first))} to {figures.shown(float(last))} {curve.unit}", "fixed": found.fixed,
        "error": found.error, "bends": "UPWARD" if found.bends_upward else "no",
    }  # fmt: skip


def draw(found: list[Curve], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for curve in found:
        lines = {f"exponent {curve.fit.exponent:g}": curve.points}
        picture = curves(f"cost by {curve.quantity}", curve.quantity, curve.unit, lines)
        (folder / f"{curve.quantity.replace(', ', '-').replace(' ', '-')}.svg").write_text(picture, encoding="utf-8")


def run(model: Path, sizes: list[Path], *, threads: int, rounds: int) -> list[Curve]:
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        adapters = make_adapters(model, MANY, Path(scratch))
        with workers([HERE], {"settings": settings(model, threads, MANY), "adapters": adapters}) as (worker,):
            for curve in step_curves(worker, rounds=rounds):
                print(figures.table([told_of(curve)], COLUMNS), file=sys.stderr, flush=True)
                found.append(curve)
    found += [vocabulary_curve(rounds=rounds), router_curve(rounds=rounds)]
    if len(sizes) >= 3:
        found += loading_curves(sizes, threads=threads)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sizes", type=Path, nargs="*", default=[], help="models to load, three at least")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plots", type=Path, help="a folder for the curves, as SVG")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = run(args.model, args.sizes, threads=args.threads, rounds=args.rounds)
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", encoding="utf-8")
    if args.plots:
        draw(found, args.plots)
    print(figures.table([told_of(each) for each in found], COLUMNS))


if __name__ == "__main__":
    main()
