"""What hostile neighbours do to eight well-behaved streams on their replica: every gap between two tokens.

    python benchmarks/bench_neighbours.py --model random-tiny --dtype float32
    python benchmarks/bench_neighbours.py --model builtin:demo --dtype float32 --tokens 400 --only "a ,b "

Starts the service with one replica, lets eight greedy streams run alone and beside each neighbour by turns (alone,
hostile, alone, …), and prints JSON, then a table. Two of the eight use an adapter, and there are two slots. Gaps are
counted from the moment the neighbour begins. `least worst` is the worst gap of the best round: what every round had.
A token that shows no text yet, as a part
of a character has none, is a token: its numbers are asked for, so that no gap is counted twice.
A case ends after `--case-timeout` seconds with the rounds it has; a stream that has not ended then has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.hostile import ATTACKS, Target, neighbour
from benchmarks.poison import CALM, make_adapters
from benchmarks.random_models import model_folder
from benchmarks.service import REPOSITORY, Service, first_token, running_service

NAME = "bench"
NUM_STREAMS = 8
WARM_TOKENS = 12
SETTLE_S = 60.0
MIN_PHASE_S = 10.0
BUSY = re.compile(rf'^serve_app_replica_sequences_\w+{{model="{NAME}",.*}} (\d+)', re.MULTILINE)
COLUMNS = (
    "case", "step", "p99", "worst of each round", "worst/step", "alone: step", "worst", "least worst/alone", "failed",
    "same texts", "answers",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Stream:
    """What one stream has sent; at_s: when each event with a token came."""

    text: str = ""
    at_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def has_failed(self) -> bool:
        return self.error is not None or self.finish_reason is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Eight streams, from the moment on which a neighbour may have begun."""

    streams: tuple[Stream, ...]
    began_at: float
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def gaps_ms(self) -> list[float]:
        found: list[float] = []
        for stream in self.streams:
            later = [at for at in stream.at_s if at >= self.began_at]
            found += [(b - a) * 1e3 for a, b in pairwise(later)]
        return found

    @property
    def worst_ms(self) -> float:
        return max(self.gaps_ms, default=float("nan"))

    @property
    def num_failed(self) -> int:
        return sum(stream.has_failed for stream in self.streams)

    def num_same(self, texts: Sequence[str]) -> int:
        return sum(stream.text == text for stream, text in zip(self.streams, texts, strict=True))


async def read_stream(
    target: Target, number: int, num_tokens: int, stream: Stream, on_text: Callable[[], None]
) -> None:
    model = f"{target.model}:{CALM}" if number % 4 == 3 else target.model
    body = json.dumps({
        "model": model, "prompt": f"Story {number}: once upon a time", "max_tokens": num_tokens, "ignore_eos": True,
        "temperature": 0, "stream": True, "return_token_ids": True,
    }).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    try:
        writer.write(head.encode() + b"\r\n\r\n" + body)
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith((b"data: {", b'{"error"')):
                take(stream, json.loads(line.removeprefix(b"data: ")))
                on_text()
    except (OSError, ValueError) as error:
        stream.error = repr(error)
    finally:
        writer.close()


def take(stream: Stream, event: dict[str, Any]) -> None:
    if "error" in event:
        stream.error = str(event["error"])
        return
    for choice in event["choices"]:
        stream.finish_reason = choice["finish_reason"] or stream.finish_reason
        if choice["text"] or choice.get("token_ids"):
            stream.text += choice["text"]
            stream.at_s.append(time.monotonic())


async def run_streams(target: Target, num_tokens: int, timeout_s: float, on_warm: Callable[[], None]) -> Phase:
    """Eight streams to their end, or for so many seconds. `on_warm` is called once each of them runs."""
    streams = tuple(Stream() for _ in range(NUM_STREAMS))
    warm_at: list[float] = []

    def on_text() -> None:
        if not warm_at and all(len(each.at_s) >= WARM_TOKENS or each.error for each in streams):
            warm_at.append(time.monotonic())
            on_warm()

    reading = (read_stream(target, number, num_tokens, each, on_text) for number, each in enumerate(streams))
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*reading)
    except TimeoutError:
        for each in streams:
            if each.finish_reason is None and each.error is None:
                each.error = f"had not ended after {timeout_s:.0f} s, {len(each.at_s)} events"
    return Phase(streams=streams, began_at=warm_at[0] if warm_at else time.monotonic())


def alone(target: Target, num_tokens: int, timeout_s: float) -> Phase:
    return asyncio.run(run_streams(target, num_tokens, timeout_s, lambda: None))


def beside(name: str, target: Target, num_tokens: int, timeout_s: float) -> Phase:
    with neighbour(name, target) as (begins, answers):
        phase = asyncio.run(run_streams(target, num_tokens, timeout_s, begins.set))
    return Phase(streams=phase.streams, began_at=phase.began_at, answers=answers)


def settle(url: str, timeout_s: float = SETTLE_S) -> None:
    """Wait until the replica has nothing to do."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(0.5)
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
                busy = BUSY.findall(response.read().decode())
        except OSError:
            continue
        if busy and not any(map(int, busy)):
            return
    print(f"still busy after {timeout_s:.0f} s", file=sys.stderr)


def judge(name: str, texts: Sequence[str], quiet: Sequence[Phase], hostile: Sequence[Phase]) -> dict[str, Any]:
    """The figures of one case, in milliseconds."""
    calm = [gap for phase in quiet for gap in phase.gaps_ms]
    gaps = sorted(gap for phase in hostile for gap in phase.gaps_ms)
    worst = [phase.worst_ms for phase in hostile]
    step, worst_alone = (statistics.median(calm), max(calm)) if calm else (float("nan"), float("nan"))
    answers = sum((phase.answers for phase in hostile), Counter())
    return {
        "case": name,
        "num_rounds": len(hostile),
        "median_ms": round(statistics.median(gaps), 1) if gaps else None,
        "p99_ms": round(gaps[len(gaps) * 99 // 100], 1) if gaps else None,
        "worst_ms": [round(each, 1) for each in worst],
        "worst/median_alone": round(max(worst) / step, 2),
        "least_worst/median_alone": round(min(worst) / step, 2),
        "worst/worst_alone": round(max(worst) / worst_alone, 2),
        "median_alone_ms": round(step, 1),
        "worst_alone_ms": round(worst_alone, 1),
        "num_failed": sum(phase.num_failed for phase in hostile),
        "errors": sorted({str(s.error)[:300] for phase in hostile for s in phase.streams if s.has_failed}),
        "num_same": [phase.num_same(texts) for phase in hostile],
        "num_same_alone": [phase.num_same(texts) for phase in quiet],
        "answers": dict(answers),
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        (
            each["case"], each["median_ms"], each["p99_ms"], " ".join(map(str, each["worst_ms"])),
            f"{each['worst/median_alone']} (least {each['least_worst/median_alone']})", each["median_alone_ms"],
            each["worst_alone_ms"], each["worst/worst_alone"], each["num_failed"],
            f"{' '.join(map(str, each['num_same']))} (alone {' '.join(map(str, each['num_same_alone']))})",
            " ".join(f"{kind}: {count}" for kind, count in sorted(each["answers"].items())),
        )
        for each in results
    ]  # fmt: skip
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (COLUMNS, ("---",) * len(COLUMNS), *lines))


def compare(service: Service, target: Target, options: argparse.Namespace) -> list[dict[str, Any]]:
    texts = [stream.text for stream in alone(target, options.tokens, options.case_timeout).streams]
    results = []
    for name in ATTACKS:
        if not name.startswith(tuple(options.only.split(","))):
            continue
        quiet, hostile = rounds(name, service, target, options)
        results.append(judge(name, texts, quiet, hostile))
        print(json.dumps(results[-1]), flush=True)
    return results


def rounds(name: str, service: Service, target: Target, options: argparse.Namespace) -> tuple[list[Phase], list[Phase]]:
    """Phases alone and beside a neighbour, by turns: as many as fit the case's time, one of each at least."""
    deadline = time.monotonic() + options.case_timeout
    quiet: list[Phase] = []
    hostile: list[Phase] = []

    def left_s() -> float:
        return max(MIN_PHASE_S, deadline - time.monotonic())

    while len(hostile) < options.rounds and (not hostile or time.monotonic() < deadline):
        settle(service.url, min(SETTLE_S, left_s()))
        quiet.append(alone(target, options.tokens, left_s()))
        settle(service.url, min(SETTLE_S, left_s()))
        hostile.append(beside(name, target, options.tokens, left_s()))
    return quiet, hostile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-tiny", help="a folder, builtin:demo, or the shape of a random one")
    parser.add_argument("--dtype", default="auto", help="float32 for texts that must be the same")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-mib", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=160, help="of each of the eight streams")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="how the names of the cases begin, with commas between")
    parser.add_argument("--case-timeout", type=float, default=240.0, help="seconds for all rounds of a case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        is_demo = options.model == "builtin:demo"
        folder = REPOSITORY / "serve_app/demo/model" if is_demo else model_folder(options.model, Path(scratch))
        make_adapters(folder, Path(scratch) / "adapters")
        config = json.loads((folder / "config.json").read_text())
        arguments = {
            "name": NAME, "path": str(folder), "adapters": f"{scratch}/adapters", "dtype": options.dtype,
            "threads": options.threads, "kv_cache_bytes": options.kv_mib << 20, "max_num_sequences": options.sequences,
            "max_adapters": 2,
        }  # fmt: skip
        with running_service() as service:
            service.deploy(arguments)
            first_token(service.url, NAME)
            target = Target(
                port=service.port, model=NAME, context=config["max_position_embeddings"],
                ids=min(256, config["vocab_size"]),
            )  # fmt: skip
            results = compare(service, target, options)
    print(json.dumps(results, indent=1))
    print("\n" + table(results))


if __name__ == "__main__":
    main()
