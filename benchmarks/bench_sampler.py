"""Time of a sampling step beside a straightforward one that sorts, on the same logits, interleaved in one run.

    python benchmarks/bench_sampler.py --rows 32 --vocab 151936

Every row has another mix of options. Prints JSON: best and median milliseconds per step of both, and their ratio; the
same for rows that are all greedy, all plain (temperature alone) and all truncated by top-k and top-p.

Then, ours alone, one setting after the other on logits of every shape: `--shapes 0` leaves that table out.

    python benchmarks/bench_sampler.py --beside ../before --rows 8 --threads 1

prints that table alone, of this checkout and of another one, which take turns, with their ratios.

Logits are normal with a standard deviation of `--spread`; the entropy of their softmax is about
ln(vocab) - spread**2 / 2 nats: 3.1 for 4.2, as a language model's on ordinary text, and 7.4 for 3, far flatter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, os.environ.get("MEASURED_CHECKOUT", str(Path(__file__).parents[1])))

import torch
from torch import Tensor

from serve_app.core.request import TEMPERATURE_LAST, DryParams, SamplingParams
from serve_app.engine.sampling.sampler import Sampler
from serve_app.engine.scheduler.sequence import Sequence
from tests.engine.sampling_reference import row

HERE = str(Path(__file__).parents[1])


def mixed(index: int) -> SamplingParams:
    """Each option in every few rows, so that no two rows of 32 are alike."""
    return SamplingParams(
        seed=index,
        temperature=[1.0, 0.7, 1.2, 0.0][index % 4],
        top_k=[0, 40, 0][index % 3],
        top_p=[1.0, 0.95, 0.9, 1.0, 0.5][index % 5],
        min_p=[0.0, 0.05][index % 2],
        typical_p=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9][index % 7],
        top_n_sigma=[0.0, 0.0, 0.0, 0.0, 1.5][index % 5],
        xtc_probability=[0.0, 0.0, 0.5][index % 3],
        dynamic_temperature_range=[0.0, 0.0, 0.0, 0.0, 0.0, 0.2][index % 6],
        mirostat=2 if index % 11 == 10 else 0,
        samplers=TEMPERATURE_LAST if index % 2 else SamplingParams().samplers,
        repetition_penalty=[1.0, 1.1][index % 2],
        presence_penalty=[0.0, 0.0, 0.5][index % 3],
        penalty_window=[None, 64][index % 2],
        logit_bias=((100 + index, 1.0),) if index % 4 == 1 else (),
        dry=DryParams(multiplier=0.8) if index % 5 == 2 else None,
    )


WORKLOADS: dict[str, Callable[[int], SamplingParams]] = {
    "mixed": mixed,
    "greedy": lambda index: SamplingParams(temperature=0.0),
    "plain": lambda index: SamplingParams(seed=index),
    "top_k and top_p": lambda index: SamplingParams(seed=index, temperature=0.8, top_k=50, top_p=0.9),
}


SETTINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "top_p": SamplingParams(top_p=0.9),
    "top_k and top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "top_k, top_p, min_p": SamplingParams(top_k=40, top_p=0.95, min_p=0.05),
    "hot top_p": SamplingParams(temperature=1.3, top_p=0.95),
    "top_k 5000": SamplingParams(top_k=5000),
    "min_p": SamplingParams(min_p=0.05),
    "typical_p": SamplingParams(typical_p=0.9),
    "top_n_sigma": SamplingParams(top_n_sigma=1.0),
    "xtc": SamplingParams(xtc_probability=1.0, xtc_threshold=0.0),
    "dynamic temperature": SamplingParams(dynamic_temperature_range=0.3),
    "mirostat 1": SamplingParams(mirostat=1),
    "mirostat 2": SamplingParams(mirostat=2, mirostat_tau=9.0),
}
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "peaked": lambda noise: noise * 4.2,
    "flat": lambda noise: noise * 0.05,
    "equal": lambda noise: noise * 0.0,
    "of few values": lambda noise: (noise * 4).round() / 2,
    "one spike": lambda noise: (noise * 0.05).index_fill(1, torch.tensor([7]), 9.0),
}


def table_of_shapes(num_rows: int, vocab: int, rounds: int, dtype: str) -> dict[str, dict[str, float]]:
    """Best milliseconds per step of each setting on each shape of logits, all settings in turn."""
    noise = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(1))
    table: dict[str, dict[str, float]] = {name: {} for name in SETTINGS}
    sampler = Sampler()
    for shape, made in SHAPES.items():
        logits = made(noise).to(getattr(torch, dtype)).float()
        for _ in range(rounds):
            for name, params in SETTINGS.items():
                rows = [row(params) for _ in range(num_rows)]
                spent = milliseconds(lambda: sampler.choose(logits, rows))  # noqa: B023
                table[name][shape] = round(min(spent, table[name].get(shape, spent)), 2)
    return table


def table_beside(checkout: str, args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The best of each cell here and of the other checkout, "before -> after (ratio)"; they take turns."""
    best: dict[str, dict[str, dict[str, float]]] = {}
    command = [sys.executable, __file__, "--shapes-only", "--rows", str(args.rows), "--vocab", str(args.vocab)]
    command += ["--threads", str(args.threads), "--shapes", "2", "--dtype", args.dtype]
    for _ in range(args.shapes):
        for tree in (checkout, HERE):
            environment = os.environ | {"MEASURED_CHECKOUT": str(Path(tree).resolve())}
            told = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
            known = best.setdefault(tree, told)
            for name, cells in told.items():
                known[name] = {shape: min(spent, known[name][shape]) for shape, spent in cells.items()}
    before, after = best[checkout], best[HERE]
    return {
        name: {shape: f"{old} -> {after[name][shape]} ({old / after[name][shape]:.2f})" for shape, old in cells.items()}
        for name, cells in before.items()
    }


def sort_based(logits: Tensor, rows: list[Sequence], seen: Tensor, counts: Tensor) -> Tensor:
    """What is commonly done: dense counts, one sort for top-k and min-p, one for top-p, softmax, multinomial."""
    params = [sequence.request.sampling for sequence in rows]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values)[:, None]

    repetition = column([p.repetition_penalty for p in params])
    scores = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    scores = scores - counts * column([p.frequency_penalty for p in params])
    scores = scores - (counts > 0) * column([p.presence_penalty for p in params])
    scores = scores / column([p.temperature if p.temperature > 0 else 1.0 for p in params])
    ordered = torch.sort(scores, dim=-1, descending=True).values
    ks = torch.tensor([p.top_k or logits.shape[-1] for p in params])
    scores = scores.masked_fill(scores < ordered.gather(1, ks[:, None] - 1), -torch.inf)
    ordered, ids = torch.sort(scores, dim=-1, descending=True)
    probabilities = torch.softmax(ordered, dim=-1)
    drop = torch.cumsum(probabilities, dim=-1) - probabilities >= column([p.top_p for p in params])
    drop |= probabilities < column([p.min_p for p in params]) * probabilities[:, :1]
    drop[:, 0] = False
    scores = scores.scatter(1, ids, ordered.masked_fill(drop, -torch.inf))
    drawn = torch.multinomial(torch.softmax(scores, dim=-1), 1)[:, 0]
    greedy = torch.tensor([p.is_greedy for p in params])
    return torch.where(greedy, scores.argmax(-1), drawn)


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--context", type=int, default=600, help="tokens that penalties see")
    parser.add_argument("--spread", type=float, default=4.2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", type=int, default=3, help="rounds of the table of shapes")
    parser.add_argument("--dtype", default="bfloat16", help="of the model that gave the logits of the table of shapes")
    parser.add_argument("--shapes-only", action="store_true", help="print nothing else")
    parser.add_argument("--beside", help="another checkout, for the table of shapes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.beside or args.shapes_only:
        shapes = (args.rows, args.vocab, args.shapes, args.dtype)
        table = table_beside(args.beside, args) if args.beside else table_of_shapes(*shapes)
        print(json.dumps(table, indent=1))
        return
    generator = torch.Generator().manual_seed(0)
    report: dict[str, object] = {"rows": args.rows, "vocab": args.vocab, "spread": args.spread, "threads": args.threads}
    sampler = Sampler(frozenset([0]))
    for name, options in WORKLOADS.items():
        tokens = torch.randint(0, args.vocab, (args.context,), generator=generator).tolist()
        half = args.context // 2
        rows = [row(options(index), prompt=tokens[:half], output=tokens[half:]) for index in range(args.rows)]
        counts = torch.zeros(args.rows, args.vocab).scatter_add_(
            1, torch.tensor(tokens).expand(args.rows, -1), torch.ones(args.rows, args.context)
        )
        ours, theirs = [], []
        for turn in range(args.rounds + 1):
            logits = torch.randn(args.rows, args.vocab, generator=generator) * args.spread
            with torch.inference_mode():
                own = milliseconds(lambda: sampler.choose(logits, rows))  # noqa: B023
                other = milliseconds(lambda: sort_based(logits, rows, counts > 0, counts))  # noqa: B023
            for sequence in rows:
                sequence.token_ids.append(turn)
            if turn:  # the first round warms up
                ours.append(own)
                theirs.append(other)
        report[name] = {
            "ours_ms": {"best": round(min(ours), 2), "median": round(statistics.median(ours), 2)},
            "sorting_ms": {"best": round(min(theirs), 2), "median": round(statistics.median(theirs), 2)},
            "sorting/ours": round(statistics.median(theirs) / statistics.median(ours), 1),
        }
    if args.shapes:
        report["best_ms_by_shape"] = table_of_shapes(args.rows, args.vocab, args.shapes, args.dtype)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
