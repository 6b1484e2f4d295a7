"""CPU time that the way to the engine costs, per request and per streamed token, by process.

    make serve
    python benchmarks/bench_overhead.py --url http://127.0.0.1:8000

Reads /proc (Linux). Sends requests of one token, then concurrent streams, and prints JSON: microseconds of CPU time
per request and per streamed token of the proxy, the router and the model replicas, idle time taken off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path

import httpx

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
GROUPS = {
    "proxy": ("ray::ProxyActor", "haproxy", "ray::HAProxyManager"),
    "router": ("ray::ServeReplica:router",),
    "model": ("ray::ServeReplica:",),  # what is not the router
    "rest of ray": ("ray::", "raylet", "gcs_server"),
}


def cpu_seconds() -> dict[str, float]:
    """CPU time used so far by each group of processes."""
    used = dict.fromkeys(GROUPS, 0.0)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            title = (folder / "cmdline").read_text().replace("\0", " ")
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        name = next((g for g, starts in GROUPS.items() if any(start in title[:120] for start in starts)), None)
        if name is not None:
            used[name] += (int(stat[11]) + int(stat[12])) * TICK_S
    return used


async def one_token(client: httpx.AsyncClient, model: str, number: int) -> int:
    body = {"model": model, "prompt": f"Number {number}", "max_tokens": 1, "temperature": 0}
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    return 1


async def stream(client: httpx.AsyncClient, model: str, number: int, max_tokens: int) -> int:
    body = {
        "model": model, "prompt": f"Once {number}", "max_tokens": max_tokens, "temperature": 1.9, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if '"usage":{' in line.replace(" ", ""):
                tokens = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
    return tokens


async def measured(jobs: list[asyncio.Task[int]], idle: dict[str, float]) -> dict[str, object]:
    before, start = cpu_seconds(), time.perf_counter()
    units = sum(await asyncio.gather(*jobs))
    elapsed = time.perf_counter() - start
    after = cpu_seconds()
    per_unit = {g: round((after[g] - before[g] - idle[g] * elapsed) * 1e6 / units, 1) for g in GROUPS}
    return {"units": units, "units_per_s": round(units / elapsed, 1), "cpu_us_per_unit": per_unit}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(base_url=args.url, timeout=120, limits=limits) as client:
        gate = asyncio.Semaphore(args.concurrency)

        async def gated(number: int) -> int:
            async with gate:
                return await one_token(client, args.model, number)

        await asyncio.gather(*(gated(i) for i in range(50)))  # warm
        before = cpu_seconds()
        await asyncio.sleep(5)
        idle = {g: (used - before[g]) / 5 for g, used in cpu_seconds().items()}
        report = {
            "idle_cpu_percent": {g: round(share * 100, 1) for g, share in idle.items()},
            "requests": await measured([asyncio.create_task(gated(i)) for i in range(args.requests)], idle),
            "streamed tokens": await measured(
                [asyncio.create_task(stream(client, args.model, i, args.max_tokens)) for i in range(args.streams)],
                idle,
            ),
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
