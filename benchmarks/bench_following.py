"""How replicas follow the work: from one to three under load, back to one and to none, and from none by a request.

    python -m benchmarks.bench_following --streams 1000

Starts a service of its own with two routers and the demo model. Clients in a closed loop stream completions of one
length: many at once until three replicas run, then few until one is left. Prints JSON: seconds until each number of
replicas, how long first tokens took, and streams that were cut. A cut stream lacks its end or some of its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.service import first_token, running_service
from serve_app.deployments.autoscaling import POLICY

MODEL = {"name": "demo", "path": "builtin:demo", "max_num_sequences": 8}
SCALING = {
    "min_replicas": 0,
    "initial_replicas": 1,
    "max_replicas": 3,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 1,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 3,
    "downscale_to_zero_delay_s": 8,
    "policy": {"policy_function": POLICY},
}
BODY = {"model": "demo", "max_tokens": 150, "ignore_eos": True, "temperature": 0, "stream": True}
POLL_S = 0.2


@dataclass(slots=True)
class Seen:
    """first_s: until each first token;  num_cut: streams without their end or some of their tokens"""

    num_whole: int = 0
    num_cut: int = 0
    first_s: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)

    def told(self) -> dict[str, Any]:
        found = sorted(self.first_s)
        quantiles = {f"p{q}": round(found[min(len(found) - 1, len(found) * q // 100)], 3) for q in (50, 99)}
        return {"streams": self.num_whole, "cut": self.num_cut, "first_token_s": quantiles, **dict(self.wrong)}


async def stream(client: httpx.AsyncClient, number: int, seen: Seen) -> None:
    """One, and what became of it."""
    began, num_tokens, is_done, first_s = time.monotonic(), 0, False, None
    body = BODY | {"prompt": f"Story {number}: once upon a time", "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    first_s = time.monotonic() - began if first_s is None else first_s
                    num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        what = str(response.status_code)
    except httpx.HTTPError as error:
        what = type(error).__name__
    if is_done and num_tokens == BODY["max_tokens"] and first_s is not None:
        seen.num_whole += 1
        seen.first_s.append(first_s)
    else:
        seen.num_cut += 1
        seen.wrong[what] += 1


async def phase(
    client: httpx.AsyncClient, num_at_once: int, *, replicas: int, streams: int
) -> tuple[dict[str, float], Seen]:
    """Keep so many streams running until so many replicas run and so many streams have ended.

    Returns the seconds until each number of replicas was seen first.
    """
    began, seen, reached, is_over = time.monotonic(), Seen(), {}, asyncio.Event()

    async def one_after_another(number: int) -> None:
        while not is_over.is_set():
            await stream(client, number, seen)

    async with asyncio.TaskGroup() as group:
        for number in range(num_at_once):
            group.create_task(one_after_another(number))
        now = -1
        while now != replicas or seen.num_whole + seen.num_cut < streams:
            now = await num_replicas(client)
            reached.setdefault(str(now), round(time.monotonic() - began, 1))
            await asyncio.sleep(POLL_S)
        is_over.set()
    return reached, seen


async def num_replicas(client: httpx.AsyncClient) -> int:
    return len((await client.get("/live")).json()["replicas"])


async def followed(url: str, *, streams: int, at_once: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        up, busy = await phase(client, at_once, replicas=3, streams=streams * 3 // 4)
        down, calm = await phase(client, 2, replicas=1, streams=streams - busy.num_whole)
        began = time.monotonic()
        while await num_replicas(client):  # noqa: ASYNC110 # of another process
            await asyncio.sleep(POLL_S)
        asleep_s = time.monotonic() - began
        first = Seen()
        await stream(client, 0, first)
    return {
        "up_s": up,
        "busy": busy.told(),
        "down_s": down,
        "calm": calm.told(),
        "asleep_after_s": round(asleep_s, 1),
        "first_after_sleep": first.told(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=40)
    options = parser.parse_args()
    with running_service() as service:
        scaling = {"autoscaling_config": SCALING, "graceful_shutdown_timeout_s": 120}
        service.deploy(MODEL, num_routers=2, scaling=scaling)
        first_token(service.url, "demo")
        told = asyncio.run(followed(service.url, streams=options.streams, at_once=options.at_once))
        print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
