"""What an overload does to the service: goodput, refusals, health meanwhile, and how soon all is well afterwards.

    make serve
    python tests/bench/bench_overload.py --url http://127.0.0.1:8000

Keeps so many connections busy in a closed loop, first few and then far too many, over raw sockets so that the load
costs little of the processor it shares, and prints JSON. A client that is refused comes again at once, or with
`--obey` after its Retry-After.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    host: str
    port: int
    model: str
    max_tokens: int
    obeys: bool

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
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def kind(self) -> str:
        """`ok`, a refusal of our own with all that belongs to it, or what was missing."""
        if self.status == 200:
            return "ok"
        try:
            code = json.loads(self.body)["error"]["error_code"]
        except (ValueError, KeyError, TypeError):
            return f"{self.status} without an envelope: {self.body[:60]!r}"
        return f"{self.status} {code}" + ("" if "retry-after" in self.headers else " without Retry-After")


@dataclass(slots=True)
class Seen:
    """completed_at: seconds since the load began;  refusal_s: how long each refusal took;  health_s: each answer"""

    began_at: float = field(default_factory=time.monotonic)
    completed_at: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    refusal_s: list[float] = field(default_factory=list)
    retry_after_s: list[int] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    health: Counter[str] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> Answer:
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:]) if name}
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    return Answer(status=int(head[0].split()[1]), headers=headers, body=body)


async def client(target: Target, number: int, seen: Seen, *, ends_at: float) -> None:
    """One connection's closed loop; what is under way at the end is given up."""
    writer = None
    try:
        while time.monotonic() < ends_at:
            if writer is None:
                reader, writer = await asyncio.open_connection(target.host, target.port)
            asked_at = time.monotonic()
            try:
                answer = await exchange(reader, writer, target.request(number))
            except (OSError, asyncio.IncompleteReadError):
                seen.kinds["connection lost"] += 1
                writer.close()
                writer = None
                continue
            now = time.monotonic()
            seen.kinds[answer.kind] += 1
            if answer.kind == "ok":
                seen.completed_at.append(now - seen.began_at)
                seen.latency_s.append(now - asked_at)
                continue
            seen.refusal_s.append(now - asked_at)
            seen.retry_after_s.append(int(answer.headers.get("retry-after", 0)))
            if target.obeys:
                await asyncio.sleep(seen.retry_after_s[-1])
    finally:
        if writer is not None:
            writer.close()


async def ask_health(target: Target) -> Answer:
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        return await exchange(reader, writer, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    finally:
        writer.close()


async def watch_health(target: Target, seen: Seen) -> None:
    while True:
        asked_at = time.monotonic()
        try:
            seen.health[str((await asyncio.wait_for(ask_health(target), 5)).status)] += 1
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            seen.health[type(error).__name__] += 1
        seen.health_s.append(time.monotonic() - asked_at)
        await asyncio.sleep(0.5)


async def load(target: Target, num_connections: int, duration_s: float) -> Seen:
    seen = Seen()
    ends_at = seen.began_at + duration_s
    watcher = asyncio.create_task(watch_health(target, seen))
    clients = [asyncio.create_task(client(target, i, seen, ends_at=ends_at)) for i in range(num_connections)]
    await asyncio.sleep(duration_s)
    for task in (*clients, watcher):
        task.cancel()
    await asyncio.gather(*clients, watcher, return_exceptions=True)
    return seen


async def recover(target: Target) -> dict[str, float]:
    """Seconds until the service is healthy, and until eight requests in a row were complete."""
    began_at = time.monotonic()
    found: dict[str, float] = {}
    while "healthy_s" not in found:
        try:
            if (await asyncio.wait_for(ask_health(target), 5)).status == 200:
                found["healthy_s"] = round(time.monotonic() - began_at, 2)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.05)
    num_complete = 0
    while num_complete < 8:
        reader, writer = await asyncio.open_connection(target.host, target.port)
        answer = await exchange(reader, writer, target.request(num_complete))
        writer.close()
        num_complete = num_complete + 1 if answer.kind == "ok" else 0
        found.setdefault("first_complete_s", round(time.monotonic() - began_at, 2))
    found["complete_s"] = round(time.monotonic() - began_at, 2)
    return found


def report(seen: Seen, duration_s: float) -> dict[str, object]:
    def quantiles(values: list[float]) -> dict[str, float]:
        ordered = sorted(values)
        return {
            "median": round(statistics.median(ordered), 3), "p99": round(ordered[len(ordered) * 99 // 100], 3)
        } if ordered else {}  # fmt: skip

    second_half = [at for at in seen.completed_at if at >= duration_s / 2]
    return {
        "goodput_per_s": round(len(seen.completed_at) / duration_s, 1),
        "goodput_per_s_second_half": round(2 * len(second_half) / duration_s, 1),
        "answers": dict(seen.kinds),
        "latency_s": quantiles(seen.latency_s),
        "refusal_s": quantiles(seen.refusal_s),
        "retry_after_s": quantiles([float(each) for each in seen.retry_after_s]),
        "health": dict(seen.health),
        "health_s": quantiles(seen.health_s),
    }


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
    target = Target(
        host=url.hostname or "127.0.0.1", port=url.port or 80, model=args.model, max_tokens=args.max_tokens,
        obeys=args.obey,
    )  # fmt: skip
    await load(target, 8, 3)  # warm
    few = report(await load(target, args.few, args.seconds), args.seconds)
    await asyncio.sleep(2)
    many = report(await load(target, args.many, args.seconds), args.seconds)
    result = {"few": few, "many": many, "after": await recover(target)}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
