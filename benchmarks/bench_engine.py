"""The engine alone: decode steps and prompts in many companies, beside what the machine could do at best.

    python -m benchmarks.bench_engine --model scratch/bench/bench-0.5b [--whole] [--beside ../before]

A floor is the bytes that have to be read by the bandwidth, or the operations by the rate of a large product, whichever
is more; both are measured in the same run. With `--beside`, another checkout is measured by its own worker in a process
that takes turns with this one's, and its CPU and wall time are given as multiples of ours. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks import figures
from benchmarks.checkpoints import save_random_adapter
from benchmarks.engine_cases import QUICK, RANKS, WHOLE, Case, Shape, floor_ms
from benchmarks.figures import Figures
from serve_app.deployments.loading import AWAKE

HERE = Path(__file__).parents[1]
WORKERS = ("benchmarks/engine_worker.py", "tests/bench/engine_worker.py")
"""Where a checkout has it; until 0.2.0 benchmarks stood among tests."""
COLUMNS = ("case", "wall_ms", "cpu_ms", "tokens_per_s", "floor_ms", "wall/floor")
BESIDE = ("before_wall/wall", "before_cpu/cpu")
STEPS = 12
"""Timed in each round of decoding."""


class Worker:
    """A process with the engine of one tree. Raises RuntimeError where it ends.

    loading: what it took to get ready
    """

    def __init__(self, tree: Path, told: dict[str, Any]) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(tree.resolve()), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": AWAKE["own"],
            "OMP_NUM_THREADS": str(told["settings"]["threads"]),
        }  # fmt: skip
        pipe = subprocess.PIPE
        worker = next(file for name in WORKERS if (file := tree.resolve() / name).is_file())
        self._process = subprocess.Popen(
            [sys.executable, str(worker)], env=environment, stdin=pipe, stdout=pipe, text=True
        )
        self.loading = self.ask(told)

    def ask(self, what: dict[str, Any]) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def workers(trees: Items[Path], told: dict[str, Any]) -> Iterator[list[Worker]]:
    running = [Worker(tree, told) for tree in trees]
    try:
        yield running
    finally:
        for each in running:
            each.close()


def make_adapters(model: Path, count: int, scratch: Path) -> dict[str, str]:
    """Folders by version, of ranks that differ."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return {
        f"a{number}": str(save_random_adapter(scratch / f"a{number}", module, rank=RANKS[number % 4], seed=number))
        for number in range(count)
    }


def measure(asked: Items[Worker], cases: Items[Case], *, rounds: int) -> dict[str, list[Figures]]:
    """Of each case, the medians of each worker over the rounds, in which they take turns; a round before warms up."""
    told: dict[str, list[list[Figures]]] = {case.name: [[] for _ in asked] for case in cases}
    for turn in range(rounds + 1):
        for case in cases:
            order = list(enumerate(asked))
            for number, worker in order if turn % 2 else reversed(order):
                answer = worker.ask({"case": case.told(), "steps": STEPS if turn else 1})
                said = f"{turn}/{rounds} {case.name}: {figures.shown(answer['wall_ms'])} ms"
                print(said, file=sys.stderr, flush=True)
                if turn:
                    told[case.name][number].append(dict(answer))
    return {name: [figures.medians(rounds_of) for rounds_of in by_worker] for name, by_worker in told.items()}


def rows_of(cases: Items[Case], measured: dict[str, list[Figures]], floors: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        ours, *others = measured[case.name]
        wall = ours["wall_ms"] or 0.0
        tokens = case.rows * case.num_computed
        row = {"case": case.name, **ours, "tokens_per_s": tokens * 1e3 / wall, "floor_ms": floors[case.name]}
        row["wall/floor"] = wall / floors[case.name]
        for other in others:
            ratio = figures.ratios(other, ours)
            row |= {"before_wall/wall": ratio["wall_ms"], "before_cpu/cpu": ratio["cpu_ms"]}
        rows.append(row)
    return rows


def run(
    model: Path, *, cases: Items[Case], dtype: str, threads: int, rounds: int, trees: Items[Path]
) -> dict[str, Any]:
    """Figures by case, and the machine's."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    shape = Shape.of(config, torch.finfo(getattr(torch, dtype)).bits // 8)
    count = max(max(case.adapters, case.resident) for case in cases)
    settings = {
        "name": "bench", "path": str(model.resolve()), "dtype": dtype, "threads": threads, "max_num_sequences": 64,
        "max_batch_tokens": 1024, "kv_cache_bytes": 2 << 30, "max_adapters": max(1, count),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        adapters = make_adapters(model, count, Path(scratch))
        with workers(trees, {"settings": settings, "adapters": adapters}) as asked:
            machines = [asked[0].ask({"machine": dtype})]
            measured = measure(asked, cases, rounds=rounds)
            machines.append(asked[0].ask({"machine": dtype}))
    best = {name: max(each[name] for each in machines) for name in machines[0]}
    floors = {case.name: floor_ms(case, shape, **best) for case in cases}
    return {"machine": best, "threads": threads, "dtype": dtype, "cases": rows_of(cases, measured, floors)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder, as of benchmarks/checkpoints.py")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="all cases; minutes to an hour")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--beside", type=Path, help="another checkout, whose code is measured in turns")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    cases = [case for case in (WHOLE if args.whole else QUICK) if args.only in case.name]
    trees = [HERE, args.beside] if args.beside else [HERE]
    told = run(args.model, cases=cases, dtype=args.dtype, threads=args.threads, rounds=args.rounds, trees=trees)
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(figures.table(told["cases"], (*COLUMNS, *(BESIDE if args.beside else ()))))
    print({name: figures.shown(value / 1e9) + "e9" for name, value in told["machine"].items()})


if __name__ == "__main__":
    main()
