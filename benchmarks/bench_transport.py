"""What the way to the engine and back costs, by process, beside bare Serve applications that only stream.

    python -m benchmarks.bench_transport --model build/bench/bench-tiny [--routers 2] [--replicas 4] [--streams 32 256]

Starts the service as its users do, with a tiny model, and in the same cluster, behind the same proxy, two applications
that send pieces which are written already (`bare_serve.py`): `one` has nothing behind its ingress, `two` a deployment
whose stream it hands on. They take turns with ours. `--period-ms` has them send a piece of every stream so often, as an
engine does; without it they send as fast as they can, and pieces that wait for the proxy go on together.
Prints JSON: tokens per second, and microseconds of processor time per token of each process, what an idle one takes
subtracted. Reads /proc (Linux).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from collections.abc import Sequence as Items
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks import bare_serve, figures
from benchmarks.checkpoints import words
from benchmarks.figures import Figures
from benchmarks.load import drive
from benchmarks.service import Service, first_token, read, running_service
from benchmarks.workloads import BY_NAME, Workload, bodies, warming

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
IDLE_S = 3.0
SETTLE_S = 0.3
READY_S = 180.0
OURS = "ours"
REPLICA = "ray::ServeReplica:"


class Processes:
    """The processes that a token passes, by what they are; others of the run are `rest`."""

    def __init__(self, service: Service, model: str) -> None:
        titles = {
            "proxy": ("ray::ProxyActor", "haproxy", "ray::HAProxyManager"),
            "router": (f"{REPLICA}router:",),
            "replica": (f"{REPLICA}{model}:",),
            "one": (f"{REPLICA}one:",),
            "two": (f"{REPLICA}two:Before",),
            "two, behind": (f"{REPLICA}two:Streams",),
        }
        self._groups = {name: [pid for each in starts for pid in service.pids(each)] for name, starts in titles.items()}
        known = {pid for pids in self._groups.values() for pid in pids}
        self._groups["rest"] = [pid for pid in service.pids("") if pid not in known]
        self._idle = dict.fromkeys(self._groups, 0.0)

    def rest(self) -> None:
        """Learn what they take while nothing is asked."""
        before = self.cpu_s()
        time.sleep(IDLE_S)
        self._idle = {name: (used - before[name]) / IDLE_S for name, used in self.cpu_s().items()}

    def cpu_s(self) -> dict[str, float]:
        return {name: sum(map(cpu_of, pids)) for name, pids in self._groups.items()}

    def spent(self, before: dict[str, float], elapsed_s: float) -> dict[str, float]:
        """Since then, beside what they take anyway."""
        now = self.cpu_s()
        return {name: now[name] - before[name] - self._idle[name] * elapsed_s for name in now}


def cpu_of(pid: int) -> float:
    """Seconds of the processor that a process has used; none of one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * TICK_S


def one_round(processes: Processes, url: str, asked: Items[dict[str, Any]], streams: int) -> Figures:
    time.sleep(SETTLE_S)
    own, before, began = time.process_time(), processes.cpu_s(), time.perf_counter()
    answers = asyncio.run(drive(url, asked, concurrency=streams))
    elapsed_s = time.perf_counter() - began
    spent = processes.spent(before, elapsed_s) | {"client": time.process_time() - own}
    told = figures.round_figures(answers)
    tokens = told["output_tokens"] or 0.0
    assert not told["errors"], {each.error for each in answers if each.error}
    assert tokens, "nothing was generated"
    found: Figures = {"tokens/s": told["output_tokens_per_s"], "gap_p50_ms": told["gap_p50_ms"]}
    found["pieces/token"] = len({at for each in answers for at in each.seen_at}) / tokens
    return found | {f"{name}, us/token": used * 1e6 / tokens for name, used in spent.items()}


def measure(service: Service, model: str, workload: Workload, *, rounds: int, period_s: float) -> dict[str, Any]:
    """Figures of each kind, medians of the rounds; all take turns in each round."""
    processes = Processes(service, model)
    processes.rest()
    urls = {OURS: service.url} | {name: f"{service.url}/{name}" for name in bare_serve.NAMES}
    extra: dict[str, Any] = {"ignore_eos": True, "period_s": period_s}
    found: dict[str, list[Figures]] = {name: [] for name in urls}
    for turn in range(-1, rounds):
        for name, url in urls.items():
            chosen = warming(workload) if turn < 0 else workload
            own = {each: value for each, value in extra.items() if name != OURS or each != "period_s"}
            asked = bodies(chosen, [model], words(), seed=turn, extra=own)
            told = one_round(processes, url, asked, workload.concurrency)
            said = f"{workload.concurrency} streams, {name}: {figures.shown(told['tokens/s'])} tokens/s"
            print(said, file=sys.stderr, flush=True)
            if turn >= 0:
                found[name].append(told)
    return {name: {"median": figures.medians(each), "rounds": each} for name, each in found.items()}


def wait_until(is_so: Callable[[], object]) -> None:
    """Until it raises nothing."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            is_so()
            return
        except (OSError, HTTPException):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.25)


def check_replicas(url: str, number: int) -> None:
    """Raises OSError where a router knows another number of them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        known = response.read().count(b"\nserve_app_replica_steps_total{")
    if known != number:
        raise OSError(f"{known} replicas, not {number}")


def run(args: argparse.Namespace) -> dict[str, Any]:
    model = {
        "name": args.model.name, "path": str(args.model.resolve()), "dtype": "auto", "threads": args.threads,
        "max_num_sequences": max(args.streams), "kv_cache_bytes": 1 << 29,
    }  # fmt: skip
    settings = dict(each.split("=", 1) for each in args.set)
    with running_service(settings=settings) as service:
        scaling = {"num_replicas": args.replicas}
        service.deploy(model, beside=bare_serve.applications(), num_routers=args.routers, scaling=scaling)
        first_token(service.url, model["name"])
        wait_until(lambda: check_replicas(service.url, args.replicas))
        for name in bare_serve.NAMES:
            wait_until(lambda: read(f"{service.url}/{name}", {"max_tokens": 0}))  # noqa: B023
        found = {}
        for streams in args.streams:
            whole = BY_NAME["W8"]
            workload = Workload(
                name="W8", about=whole.about, kind=whole.kind, concurrency=streams,
                num_requests=args.requests * streams, prompt=whole.prompt, max_tokens=args.max_tokens,
            )  # fmt: skip
            period_s = args.period_ms / 1e3
            found[streams] = measure(service, model["name"], workload, rounds=args.rounds, period_s=period_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1, help="of the model")
    parser.add_argument("--streams", type=int, nargs="+", default=[32])
    parser.add_argument("--requests", type=int, default=2, help="of each stream's client in a round")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--period-ms", type=float, default=0.0, help="between two pieces of a bare stream")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the model's replica")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of the cluster's environment")
    args = parser.parse_args()
    print(json.dumps(run(args), indent=1))


if __name__ == "__main__":
    main()
