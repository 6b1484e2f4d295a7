"""`make bench`: the engine, the router and the whole server, beside the last run on a machine like this one.

    python -m benchmarks [--whole] [--folder build/bench]

Makes what it measures on (`benchmarks/checkpoints.py`), starts the service as its users do, and adds a line to
`benchmarks/history.jsonl`. With `--whole`, all cases and workloads, three rounds, and the curves of how cost grows.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks import bench_engine, bench_scale, checkpoints, compare, figures, history
from benchmarks.engine_cases import QUICK, WHOLE
from benchmarks.figures import Figures
from benchmarks.service import first_token, running_service
from benchmarks.workloads import BY_NAME, WORKLOADS, judged_by

QUICK_WORKLOADS = ("W1", "W2", "W7b", "W8")
NUM_STREAMS = 32
PARTS = ("engine", "router", "server", "scale")
DTYPE = "float32"
"""Which every machine computes; histories of two machines are compared by it."""


def engine_figures(folder: Path, *, is_whole: bool) -> Figures:
    """Of the model of half a billion weights: milliseconds by case, and the machine's rates."""
    told = bench_engine.run(
        folder / "bench-0.5b", cases=WHOLE if is_whole else QUICK, dtype=DTYPE, threads=os.cpu_count() or 1,
        rounds=3 if is_whole else 1, trees=[bench_engine.HERE],
    )  # fmt: skip
    print(figures.table(told["cases"], bench_engine.COLUMNS), flush=True)
    machine: Figures = {"GB/s": told["machine"]["bytes_per_s"] / 1e9, "GFLOP/s": told["machine"]["flop_per_s"] / 1e9}
    return machine | {f"{each['case']}, ms": each["wall_ms"] for each in told["cases"]}


def router_figures() -> Figures:
    """Of the router alone with 32 streams: microseconds of CPU time."""
    told = asyncio.run(bench_scale.router_figures([NUM_STREAMS], rounds=5))[NUM_STREAMS]
    print(figures.table([told], list(told)), flush=True)
    return {f"router, {name}": value for name, value in told.items()}


def server_figures(folder: Path, *, is_whole: bool) -> Figures:
    """Tokens per second by workload, through HTTP, of a service that `serve_app up` has started."""
    chosen = WORKLOADS if is_whole else tuple(BY_NAME[name].shortened() for name in QUICK_WORKLOADS)
    models = [each | {"dtype": DTYPE} for each in checkpoints.served(folder)]
    with running_service() as service:
        service.deploy(*models)
        for model in models:
            first_token(service.url, model["name"])
        server = compare.Server(name="ours", url=service.url, extra={"ignore_eos": True})
        rounds = 3 if is_whole else 1
        measured = compare.measure([server], chosen, checkpoints.words(), rounds=rounds, seed=1)
    told = compare.report([server], measured)
    print(compare.readable([server], told), flush=True)
    return {f"{name}, tokens/s": each["median"]["ours"][judged_by(name)] for name, each in told.items()}


def scale_figures(folder: Path) -> Figures:
    """Exponents by quantity; the curves are drawn into the folder's `plots`."""
    sizes = [folder / name for name in checkpoints.MODELS]
    found = bench_scale.run(folder / "bench-tiny", sizes, threads=os.cpu_count() or 1, rounds=3)
    bench_scale.draw(found, folder / "plots")
    told = [bench_scale.told_of(each) for each in found]
    print(figures.table(told, bench_scale.COLUMNS), flush=True)
    return {f"exponent of {each['quantity']}": each["exponent"] for each in told}


def beside(now: Figures, before: dict[str, Any]) -> str:
    """Each figure with that of a former run."""
    rows = [
        {"figure": name, "then": then, "now": value, "now/then": value / then}
        for name, value in now.items()
        if value is not None and (then := before["figures"].get(name))
    ]
    head = f"beside commit {before['commit']} of {before['date']}, on such a machine"
    return f"{head}\n{figures.table(rows, ('figure', 'then', 'now', 'now/then'))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="everything; an hour rather than minutes")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="for models and plots")
    parser.add_argument("--parts", nargs="+", default=list(PARTS[:3]), choices=PARTS)
    parser.add_argument("--unkept", action="store_true", help="leave the history as it is")
    args = parser.parse_args()
    parts = set(PARTS if args.whole else args.parts)
    checkpoints.make_all(args.folder)
    found: Figures = {}
    if "engine" in parts:
        found |= engine_figures(args.folder, is_whole=args.whole)
    if "router" in parts:
        found |= router_figures()
    if "server" in parts:
        found |= server_figures(args.folder, is_whole=args.whole)
    if "scale" in parts:
        found |= scale_figures(args.folder)
    what = {"is_whole": args.whole, "dtype": DTYPE}
    if (before := history.last_alike(what)) is not None:
        print(beside(found, before))
    if not args.unkept:
        history.append(found, what=what)


if __name__ == "__main__":
    sys.exit(main())
