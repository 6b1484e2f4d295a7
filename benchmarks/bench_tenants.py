"""What a greedy tenant does to nineteen others on one service: how long they wait for a first token, who is refused.

    python -m benchmarks.bench_tenants --seconds 60
    python -m benchmarks.bench_tenants --model build/bench/bench-0.5b --dtype bfloat16 --threads 2

Starts one replica (of the demo, if no model is named) and one router with keys, finds out how many requests a second it
completes of the greedy tenant alone, and then lets every tenant but the last send a part of its share at random times,
alone (`alone`), beside the last one within its share (`shared`), and beside the last one with ten times of all there is
(`greedy`: closed loops, some of which come again at once when they are refused). `full` is a machine without a greedy
tenant, of which everybody takes the share that is its own; `full, greedy` the same beside the greedy one. Prints JSON.
Linux only: memory and processes are read in /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.house import House, with_keys

NUM_TENANTS = 20
MAX_TOKENS = 16
SETTING = {"temperature": 0, "ignore_eos": True, "stream": True}
"""Greedy: of what is drawn at random some tokens are parts of characters, and show nothing by themselves."""
EARLY_S = 8.0
"""Of a phase: hundreds of connections come in one instant."""
MEASURED_S = 16.0
"""Of the greedy one alone: what the machine gives where it refuses as many as it does later."""
END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One phase. keys: of all tenants, the greedy one's last

    name:   in its prompts, which are no other phase's: nothing of them is kept
    per_s:  requests per second of each tenant that is not greedy
    loops:  of the greedy one; None where it is as the others;  rude: the part of them that comes again at once
    """

    name: str
    port: int
    keys: tuple[str, ...]
    seconds: float
    per_s: float
    loops: int | None = None
    rude: float = 0.5
    has_last: bool = True


@dataclass(slots=True)
class Seen:
    """Of one kind of tenants. first_s: seconds to a first token, by when it came;  retries: the first of each"""

    first_s: list[tuple[float, float]] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)
    retries: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, object]:
        return {
            "answers": dict(self.answers),
            "first_s": _spread([seconds for _, seconds in self.first_s]),
            "first_s_later": _spread([seconds for at, seconds in self.first_s if at > self.began_at + EARLY_S]),
            "refused_s": _spread(self.refused_s),
            "first_retries": dict(self.retries),
        }


@dataclass(slots=True)
class Line:
    """A connection of a tenant. Raises OSError and IncompleteReadError where it is lost."""

    port: int
    key: str
    _reader: asyncio.StreamReader | None = None
    _writer: asyncio.StreamWriter | None = None

    async def complete(self, prompt: str, seen: Seen) -> float:
        """Ask once, and read all. Returns the seconds after which to come again; 0 where it was answered."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        assert self._reader is not None
        self._writer.write(_request(self.key, prompt))
        asked_at = time.monotonic()
        head = (await self._reader.readuntil(END_OF_HEAD)).lower()
        status = head[9:12].decode()
        if status == "200":
            await self._read_stream(asked_at, seen)
            seen.answers["200"] += 1
            return 0.0
        body = await self._reader.readexactly(int(_value(head, b"content-length")))
        retry_after = _value(head, b"retry-after")
        seen.answers[
            f"{status} {json.loads(body).get('error_code')}{'' if retry_after else ' without Retry-After'}"
        ] += 1
        seen.refused_s.append(time.monotonic() - asked_at)
        if _value(head, b"connection") == b"close":
            self.close()
        return float(retry_after or 1)

    async def _read_stream(self, asked_at: float, seen: Seen) -> None:
        """Server-sent events in chunks."""
        assert self._reader is not None
        is_first = True
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            piece = await self._reader.readexactly(size + 2)
            if is_first and b'"text"' in piece:
                seen.first_s.append((time.monotonic(), time.monotonic() - asked_at))
                is_first = False
        await self._reader.readexactly(2)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _request(key: str, prompt: str) -> bytes:
    asked = {"model": "demo", "prompt": prompt, "max_tokens": MAX_TOKENS, **SETTING}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}"
    return head.encode() + END_OF_HEAD + body


def _value(head: bytes, name: bytes) -> bytes:
    _, found, rest = head.partition(b"\r\n" + name + b":")
    return rest.partition(b"\r\n")[0].strip() if found else b""


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    at = {"p95": 95, "p99": 99}
    found = {name: round(ordered[len(ordered) * percent // 100], 3) for name, percent in at.items()}
    return {"number": len(ordered), "median": round(statistics.median(ordered), 3), **found}


async def send_now_and_then(plan: Plan, key: str, seen: Seen, drawn: random.Random) -> None:
    """A tenant whose requests come at random times, whether earlier ones are answered or not. Refused ones obey."""
    idle: list[Line] = []
    async with asyncio.TaskGroup() as group:
        until = time.monotonic() + plan.seconds
        while (now := time.monotonic()) < until:
            group.create_task(_send(plan, key, idle, seen, f"{plan.name}: tell me of number {drawn.random()}", until))
            await asyncio.sleep(min(drawn.expovariate(plan.per_s), until - now))
    for line in idle:
        line.close()


async def _send(plan: Plan, key: str, idle: list[Line], seen: Seen, prompt: str, until: float) -> None:
    line = idle.pop() if idle else Line(plan.port, key)
    try:
        num_refused = 0
        while retry_s := await line.complete(prompt, seen):
            if num_refused == 1:
                seen.retries["refused"] += 1
            num_refused += 1
            if time.monotonic() + retry_s > until:
                break
            await asyncio.sleep(retry_s)
        else:
            seen.retries["answered"] += num_refused == 1
        idle.append(line)
    except (OSError, asyncio.IncompleteReadError) as error:
        seen.answers[type(error).__name__] += 1
        line.close()


async def send_for_ever(plan: Plan, seen: Seen, number: int, *, obeys: bool) -> None:
    """A closed loop of the greedy tenant."""
    line, count, is_retry = Line(plan.port, plan.keys[-1]), 0, False
    until = time.monotonic() + plan.seconds
    while (now := time.monotonic()) < until:
        count += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(until - now):
                try:
                    retry_s = await line.complete(f"{plan.name}: more of number {number} {count}", seen)
                    if is_retry:
                        seen.retries["refused" if retry_s else "answered"] += 1
                    is_retry = obeys and retry_s > 0 and not is_retry
                    await asyncio.sleep(retry_s if obeys else 0)
                except (OSError, asyncio.IncompleteReadError) as error:
                    seen.answers[type(error).__name__] += 1
                    line.close()
                    await asyncio.sleep(0.1)
    line.close()


def drive(plan: Plan) -> dict[str, Any]:
    """Carried out in the clients' process."""
    return asyncio.run(_drive(plan))


async def _drive(plan: Plan) -> dict[str, Any]:
    others, last_rude, last_polite = Seen(), Seen(), Seen()
    async with asyncio.TaskGroup() as group:
        for number, key in enumerate(plan.keys[:-1]):
            group.create_task(send_now_and_then(plan, key, others, random.Random(number)))
        if plan.loops is not None:
            drawn = random.Random(plan.loops)
            for number in range(plan.loops):
                obeys = drawn.random() >= plan.rude  # whoever connects first finds places
                seen = last_polite if obeys else last_rude
                group.create_task(send_for_ever(plan, seen, number, obeys=obeys))
        elif plan.has_last:
            group.create_task(send_now_and_then(plan, plan.keys[-1], last_polite, random.Random(NUM_TENANTS)))
    return {"others": others.as_dict(), "last, obeys": last_polite.as_dict(), "last, rude": last_rude.as_dict()}


def where_it_went(house: House, since: float) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds in the engine's queue, of prefill and of decoding, as the ledger has them."""
    time.sleep(2)  # rows are written in groups
    with sqlite3.connect(house.folder / "kept.db") as connection:
        rows = connection.execute(
            "select tenant, queue_s, prefill_s, decode_s from ledger where at >= ? and status = 200", (since,)
        ).fetchall()
    found = {}
    for kind in ("others", "last"):
        chosen = [row[1:] for row in rows if (row[0] == f"tenant-{NUM_TENANTS - 1}") == (kind == "last")]
        if chosen:
            columns = zip(("queue_s", "prefill_s", "decode_s"), zip(*chosen, strict=True), strict=True)
            found[kind] = {name: _spread(list(column)) for name, column in columns}
    return found


def rss_mb(house: House) -> dict[str, float]:
    """Resident memory of the service's processes, by what they are."""
    found: Counter[str] = Counter()
    for process in house.run.processes():
        kind = process.command.split(".")[0].removeprefix("ray::")
        if process.command.startswith("ray::"):
            with suppress(OSError):
                pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                found[kind] += pages * 4096
    return {kind: round(number / 1e6, 1) for kind, number in found.items()}


@contextmanager
def service(
    max_in_flight: int | None = None, model: dict[str, Any] | None = None
) -> Iterator[tuple[House, tuple[str, ...]]]:
    """The service, and the tenants' keys. model: what its `args` have instead of the demo's"""

    def change(content: dict[str, Any]) -> None:
        with_keys(content)
        (application,) = (each for each in content["applications"] if each["name"] == "demo")
        application["args"] |= model or {}

    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder), change, {"SERVE_APP_PROXY_MAX_REQUESTS": "256"})
        try:
            house.command("keys", "create", "--admin")
            limits = [] if max_in_flight is None else ["--max-in-flight", str(max_in_flight)]
            keys = []
            for number in range(NUM_TENANTS):
                house.command("tenants", "add", f"tenant-{number}", *limits)
                keys.append(house.command("keys", "create", f"tenant-{number}")["key"])
            house.run.until_ready()
            house.run.until(lambda: all(house.complete(key).status_code == 200 for key in keys))
            yield house, tuple(keys)
        finally:
            house.run.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--part", type=float, default=0.6, help="of its share that each tenant asks for")
    parser.add_argument("--full", type=float, default=0.95, help="of its share, where all of them take it")
    parser.add_argument("--max-in-flight", type=int, help="of each tenant; usually no limit")
    parser.add_argument("--loops", type=int, default=400, help="of the greedy tenant")
    parser.add_argument("--model", type=Path, help="a folder; else the demo")
    parser.add_argument("--dtype", default="bfloat16", help="of that model")
    parser.add_argument("--threads", type=int, default=2, help="of its replica")
    parser.add_argument("--rude", type=float, default=0.5, help="part of them that comes again at once when refused")
    options = parser.parse_args()
    model = options.model and {
        "path": str(options.model.resolve()), "dtype": options.dtype, "threads": options.threads,
        "kv_cache_bytes": "auto",
    }  # fmt: skip
    with (
        service(options.max_in_flight, model) as (house, keys),
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):

        def run(name: str, **what: Any) -> dict[str, Any]:
            before, since = rss_mb(house), time.time()
            told = pool.submit(drive, Plan(name=name, port=house.run.port, keys=keys, **what)).result()
            rss = {"before": before, "after": rss_mb(house)}
            return {**told, "ledger": where_it_went(house, since), "rss_mb": rss}

        run("warm", seconds=4, per_s=0.01, loops=32)
        found = run("capacity", seconds=MEASURED_S, per_s=0.01, loops=options.loops, rude=options.rude)
        done = sum(found[kind]["answers"].get("200", 0) for kind in ("last, obeys", "last, rude"))
        capacity = done / MEASURED_S
        share = capacity / NUM_TENANTS
        per_s, full = options.part * share, options.full * share
        crowd = {"loops": options.loops, "rude": options.rude}
        phases: dict[str, dict[str, Any]] = {
            "full": {"seconds": options.seconds / 2, "per_s": full},
            "full, greedy": {"seconds": options.seconds, "per_s": full, **crowd},
            "full again": {"seconds": options.seconds / 2, "per_s": full},
            "alone": {"seconds": options.seconds / 2, "per_s": per_s, "has_last": False},
            "shared": {"seconds": options.seconds / 2, "per_s": per_s},
            "greedy": {"seconds": options.seconds, "per_s": per_s, **crowd},
            "alone again": {"seconds": options.seconds / 2, "per_s": per_s, "has_last": False},
        }
        told = {"capacity_per_s": capacity, "per_s": per_s, "max_in_flight": options.max_in_flight}
        told |= {name: run(name, **what) for name, what in phases.items()}
        print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
