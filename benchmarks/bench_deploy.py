"""`serve deploy` with changed `args` under long streams: none may be cut or differ, and how long it takes.

    python -m benchmarks.bench_deploy --streams 40

Starts a service of its own with two replicas of the demo model. Prints JSON: the streams that were whole, those that
differed or were cut, seconds until one replica had loaded, and seconds until all replicas had been replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from typing import Any

import httpx

from benchmarks.bench_failover import Seen, streamed
from benchmarks.service import Service, first_token, running_service

MODEL = {"name": "demo", "path": "builtin:demo", "dtype": "float32", "max_num_sequences": 64}
SCALING = {"num_replicas": 2, "graceful_shutdown_timeout_s": 600}
LONG = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 1900, "ignore_eos": True}
TITLE = "ray::ServeReplica:demo:"
PATIENCE_S = 240.0


async def measured(service: Service, *, num_streams: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=service.url, timeout=300, limits=limits) as client:
        seen = Seen()
        right = await streamed(client, LONG, "undisturbed", seen)
        before = set(service.pids(TITLE))
        streams = [asyncio.create_task(streamed(client, LONG, f"long-{at}", seen)) for at in range(num_streams)]
        await asyncio.sleep(1.0)
        begun_at = time.monotonic()
        deploying = asyncio.to_thread(service.deploy, MODEL | {"max_waiting": 1025}, scaling=SCALING)
        replaced = asyncio.create_task(replaced_s(client, service, before))
        await deploying
        told = await asyncio.gather(*streams)
        streams_s = time.monotonic() - begun_at
        ends = [each.error or ("another text" if each.is_done else "cut") for each in told if each.whole != right.whole]
        return {
            "whole": sum(each.whole == right.whole for each in told),
            "wrong": Counter(ends),
            "asked again": seen.again,
            "streams_s": streams_s,
            "replaced_s": await replaced,
        }


async def replaced_s(client: httpx.AsyncClient, service: Service, before: set[int]) -> float:
    """Seconds until there are as many new replicas as there were old ones, known to the router, and no old one."""
    start = time.monotonic()
    while time.monotonic() - start < PATIENCE_S:
        now = set(service.pids(TITLE))
        if not now & before and len(now) == len(before):
            live = (await client.get("/live")).json()
            if len(live["replicas"]) == len(before):
                return time.monotonic() - start
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{now & before} of {before} are still there after {PATIENCE_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=40)
    options = parser.parse_args()
    with running_service() as service:
        start = time.monotonic()
        service.deploy(MODEL, scaling=SCALING | {"num_replicas": 1})
        load_s = first_token(service.url, "demo") - start
        service.deploy(MODEL, scaling=SCALING)
        while len(service.pids(TITLE)) < 2:
            time.sleep(0.2)
        time.sleep(5.0)
        found = asyncio.run(measured(service, num_streams=options.streams))
        print(json.dumps({"load_s": load_s, **found}, indent=1))


if __name__ == "__main__":
    main()
