"""Measures servers beside each other, in turns: the workloads W1 to W8 against any that speak OpenAI's completions.

    python -m benchmarks.compare ours=http://127.0.0.1:8000 other=http://127.0.0.1:8101 --words models/words.txt

A server is NAME=URL, or a file of JSON that tells more of it:

    {"name": "vllm", "url": "http://127.0.0.1:8101", "extra": {"ignore_eos": true}, "stops": [4711],
     "models": {"base": ["bench-0.5b"], "adapters": ["lora-0", "lora-1"]},
     "urls": {"tiny": "http://127.0.0.1:8102"}}

where `urls` are for kinds of models that another process serves, and `stops` are process groups that are stopped
(SIGSTOP) while another server is measured. Each round goes through all servers, workload by workload, with the same
prompts; the order turns from round to round. Prints a table of medians, the first server's as multiples of the others',
and writes everything with `--json`. Prompts are made of words that are one token each (`benchmarks/checkpoints.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.figures import Figures
from benchmarks.load import drive
from benchmarks.workloads import BY_NAME, WORKLOADS, Workload, bodies, judged_by, warming

COLUMNS = (
    "workload", "server", "errors", "output_tokens_per_s", "total_tokens_per_s", "first_token_p50_ms",
    "first_token_p99_ms", "gap_p50_ms", "gap_p99_ms",
)  # fmt: skip
SETTLE_S = 0.3
"""Between the end of one server's turn and the next one's."""


def own_names() -> dict[str, list[str]]:
    """Names of the models of `benchmarks/checkpoints.py` as this project has them."""
    return {
        "base": ["bench-0.5b"],
        "tiny": ["bench-tiny"],
        "adapters": [f"bench-0.5b:lora-{number}" for number in range(8)],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where requests go, and under which names.

    takes_lists: of prompts, in one request; a server that does not is sent as many requests at once
    stops: process groups that are stopped while another server is measured
    rounds: at most so many, for one that is too slow to wait for
    """

    name: str
    url: str
    takes_lists: bool = True
    models: dict[str, list[str]] = field(default_factory=own_names)
    urls: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    stops: tuple[int, ...] = ()
    rounds: int | None = None

    @classmethod
    def of(cls, spelled: str) -> Server:
        """From `NAME=URL`, or the name of a file. Raises ValueError, OSError."""
        if spelled.endswith(".json"):
            told = json.loads(Path(spelled).read_text(encoding="utf-8"))
            return cls(**told | {"models": own_names() | told.get("models", {}), "stops": tuple(told.get("stops", ()))})
        name, separator, url = spelled.partition("=")
        if not separator:
            raise ValueError(f"a server is NAME=URL or a file of JSON, not {spelled!r}")
        return cls(name=name, url=url.rstrip("/"))

    def url_of(self, workload: Workload) -> str:
        return self.urls.get(workload.kind, self.url)

    def is_measured(self, workload: Workload, turn: int) -> bool:
        return bool(self.models.get(workload.kind)) and (self.rounds is None or turn < self.rounds)


Rounds = dict[str, dict[str, list[Figures]]]
"""Of each workload and server, what each round came to."""


def measure(servers: Items[Server], workloads: Items[Workload], words: Items[str], *, rounds: int, seed: int) -> Rounds:
    measured: Rounds = {workload.name: {} for workload in workloads}
    with stopped(group for server in servers for group in server.stops):
        for turn in range(rounds):
            for workload in workloads:
                for server in turned(servers, turn):
                    if server.is_measured(workload, turn):
                        with resumed(server.stops):
                            told = one_round(server, workload, words, seed=seed + turn, is_first=turn == 0)
                        measured[workload.name].setdefault(server.name, []).append(told)
    return measured


def turned(servers: Items[Server], turn: int) -> list[Server]:
    first = turn % len(servers)
    return [*servers[first:], *servers[:first]]


def one_round(server: Server, workload: Workload, words: Items[str], *, seed: int, is_first: bool) -> Figures:
    time.sleep(SETTLE_S)
    if not server.takes_lists:
        workload = workload.spread()
    if is_first:
        send(server, warming(workload), words, seed=seed - 1)
    told = send(server, workload, words, seed=seed)
    said = f"{figures.shown(told[judged_by(workload.name)]):>8} tokens/s  {told['errors']} errors"
    print(f"{workload.name:4} {server.name:12} {said}", file=sys.stderr, flush=True)
    return told


def send(server: Server, workload: Workload, words: Items[str], *, seed: int) -> Figures:
    asked = bodies(workload, server.models[workload.kind], words, seed=seed, extra=server.extra)
    answers = asyncio.run(drive(server.url_of(workload), asked, concurrency=workload.concurrency))
    for error in sorted({each.error for each in answers if each.error})[:3]:
        print(f"     {server.name}: {error}", file=sys.stderr)
    return figures.round_figures(answers)


@contextmanager
def stopped(groups: Iterator[int]) -> Iterator[None]:
    """Process groups that stand still until the block ends."""
    chosen = list(groups)
    signal.signal(signal.SIGTERM, _leave)  # so that what stands still goes on whoever ends this
    try:
        for group in chosen:
            os.killpg(group, signal.SIGSTOP)
        yield
    finally:
        for group in chosen:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)


@contextmanager
def resumed(groups: Items[int]) -> Iterator[None]:
    """Process groups that go on until the block ends."""
    for group in groups:
        os.killpg(group, signal.SIGCONT)
    try:
        yield
    finally:
        for group in groups:
            os.killpg(group, signal.SIGSTOP)


def report(servers: Items[Server], measured: Rounds) -> dict[str, Any]:
    """Medians and rounds by workload and server, and the first server's ratios to each of the others."""
    told: dict[str, Any] = {}
    for name, by_server in measured.items():
        medians = {server: figures.medians(rounds) for server, rounds in by_server.items()}
        ours = medians.get(servers[0].name)
        others = {server: each for server, each in medians.items() if server != servers[0].name}
        told[name] = {
            "median": medians,
            "ratio": {server: figures.ratios(ours, each) for server, each in others.items()} if ours else {},
            "rounds": by_server,
        }
    return told


def readable(servers: Items[Server], told: dict[str, Any]) -> str:
    rows = [
        {"workload": name, "server": server} | each
        for name, of_workload in told.items()
        for server, each in of_workload["median"].items()
    ]
    first = servers[0].name
    lines = [figures.table(rows, COLUMNS), "", f"{first}, as a multiple of"]
    ratio_rows = [
        {"workload": name, "by": judged_by(name)}
        | {server: each[judged_by(name)] for server, each in of_workload["ratio"].items()}
        for name, of_workload in told.items()
    ]
    return "\n".join([*lines, figures.table(ratio_rows, ("workload", "by", *(each.name for each in servers[1:])))])


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", type=Server.of, metavar="NAME=URL|FILE.json")
    parser.add_argument("--words", type=Path, required=True, help="words of one token each, one per line")
    parser.add_argument("--workloads", nargs="+", default=list(BY_NAME), choices=list(BY_NAME))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="one request of each worker, at most 32 tokens of each")
    parser.add_argument("--seed", type=int, default=1, help="another one for another run on the same servers")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    chosen = [each for each in WORKLOADS if each.name in args.workloads]
    workloads = [each.shortened() for each in chosen] if args.short else chosen
    words = args.words.read_text(encoding="utf-8").split()
    measured = measure(args.servers, workloads, words, rounds=args.rounds, seed=args.seed * 1000)
    told = report(args.servers, measured)
    if args.json:
        args.json.write_text(json.dumps({"workloads": told}, indent=1) + "\n", encoding="utf-8")
    print(readable(args.servers, told))
    return int(any(each["errors"] for of_workload in told.values() for each in of_workload["median"].values()))


if __name__ == "__main__":
    sys.exit(main())
