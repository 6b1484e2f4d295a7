"""What an overload does to the service: goodput, refusals, health meanwhile, and how soon all is well afterwards.

    make serve
    python -m benchmarks.bench_overload --url http://127.0.0.1:8000

Keeps so many connections busy in a closed loop, first few and then far too many, in a process of their own, and prints
JSON. A client that is refused comes again at once, or with `--obey` after its Retry-After. The processor time of the
server is that of the process which listens on the port, where that runs on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import statistics
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.crowd import Answer, Crowd


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    host: str
    port: int
    model: str
    max_tokens: int

    def request(self, number: int) -> bytes:
        prompt = f"Once upon a time number {number}"
        body = json.dumps(
            {"model": self.model, "prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        return head.encode() + b"\r\n\r\n" + body


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """began_at, ended_at: on the monotonic clock;  cpu_s: of the clients and of the server"""

    began_at: float
    ended_at: float
    answers: list[Answer]
    num_lost: Counter[str]
    clients_cpu_s: float
    server_cpu_s: float


@dataclass(slots=True)
class Health:
    answers: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)


def drive(target: Target, num_clients: int, duration_s: float, *, obeys: bool) -> Load:
    """Carried out in the clients' process."""
    crowd = Crowd((target.host, target.port), target.request, num_clients, obeys)
    server = listener(target.port)
    began_at, cpu_s, server_cpu_s = time.monotonic(), time.process_time(), cpu_of(server)
    crowd.run(duration_s)
    return Load(
        began_at=began_at, ended_at=time.monotonic(), answers=crowd.answers, num_lost=crowd.num_lost,
        clients_cpu_s=time.process_time() - cpu_s, server_cpu_s=cpu_of(server) - server_cpu_s,
    )  # fmt: skip


def listener(port: int) -> int | None:
    """The process that listens on the port, where one of ours does."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(each) in inodes for each in (folder / "fd").iterdir()):
                return int(folder.name)
        except OSError:  # somebody else's, or gone
            continue
    return None


def cpu_of(process: int | None) -> float:
    """Seconds of a processor so far; NaN where nobody knows."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask(target: Target, request: bytes) -> int:
    """The status of an answer, on a connection of its own."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
        return int(head.split()[1])
    finally:
        writer.close()


async def ask_health(target: Target) -> int:
    return await asyncio.wait_for(ask(target, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"), 5)


async def watch_health(target: Target, health: Health) -> None:
    while True:
        asked_at = time.monotonic()
        try:
            health.answers[str(await ask_health(target))] += 1
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            health.answers[type(error).__name__] += 1
        health.seconds.append(time.monotonic() - asked_at)
        await asyncio.sleep(0.25)


async def recover(target: Target, *, began_at: float) -> dict[str, float]:
    """Seconds until the service is healthy, and until eight requests in a row were complete."""
    found: dict[str, float] = {}
    while "healthy_s" not in found:
        try:
            if await ask_health(target) == 200:
                found["healthy_s"] = round(time.monotonic() - began_at, 2)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.05)
    num_complete = 0
    while num_complete < 8:
        num_complete = num_complete + 1 if await ask(target, target.request(num_complete)) == 200 else 0
        found.setdefault("first_complete_s", round(time.monotonic() - began_at, 2))
    found["complete_s"] = round(time.monotonic() - began_at, 2)
    return found


def spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        "number": len(ordered), "mean": round(statistics.fmean(ordered), 4),
        "median": round(statistics.median(ordered), 4), "p99": round(ordered[len(ordered) * 99 // 100], 3),
    }  # fmt: skip


def report(load: Load, health: Health, duration_s: float) -> dict[str, object]:
    done = [each for each in load.answers if each.kind == "ok"]
    refused = [each for each in load.answers if each.kind != "ok"]
    late = [each for each in done if each.asked_at + each.seconds - load.began_at >= duration_s / 2]
    return {
        "goodput_per_s": round(len(done) / duration_s, 1),
        "goodput_per_s_second_half": round(2 * len(late) / duration_s, 1),
        "answers": dict(Counter(each.kind for each in load.answers) + load.num_lost),
        "latency_s": spread(each.seconds for each in done),
        "refusal_s": spread(each.seconds for each in refused),
        "refusal_s_of_those_in_time": spread(each.seconds for each in refused if not each.is_early),
        "refusal_s_of_the_first_second": spread(each.seconds for each in refused if each.asked_at < load.began_at + 1),
        "retry_after_s": spread(each.retry_after_s for each in refused),
        "clients_cpu_s": round(load.clients_cpu_s, 2),
        "server_cpu_s": round(load.server_cpu_s, 2),
        "health": dict(health.answers),
        "health_s": spread(health.seconds),
    }


async def measure(target: Target, num_clients: int, duration_s: float, *, obeys: bool) -> dict[str, object]:
    health = Health()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(os.getpid).result()  # it has started
        watcher = asyncio.create_task(watch_health(target, health))
        work = partial(drive, target, num_clients, duration_s, obeys=obeys)
        load = await asyncio.get_running_loop().run_in_executor(pool, work)
        watcher.cancel()
        result = report(load, health, duration_s)
        if num_clients > 100:
            result["after"] = await recover(target, began_at=load.ended_at)
    return result


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--few", type=int, default=32)
    parser.add_argument("--many", type=int, default=1800)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--obey", action="store_true")
    args = parser.parse_args()
    url = urllib.parse.urlsplit(args.url)
    target = Target(host=url.hostname or "127.0.0.1", port=url.port or 80, model=args.model, max_tokens=args.max_tokens)
    await measure(target, 8, 3, obeys=False)  # warm
    few = await measure(target, args.few, args.seconds, obeys=args.obey)
    await asyncio.sleep(2)
    many = await measure(target, args.many, args.seconds, obeys=args.obey)
    print(json.dumps({"few": few, "many": many}, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
