"""Many requests at once, and what became of each when something happened to the replicas they run on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from ray import serve

from serve_app.core.cards import ReplicaCard

TIMEOUT_S = 60.0
REPLACED_TIMEOUT_S = 180.0
MAX_TOKENS = 400
"""So many that all of a dozen requests are still computed when something happens a moment after their first steps."""

Seen = TypeVar("Seen")


@dataclass(slots=True, kw_only=True)
class Streamed:
    """What one stream sent until it ended."""

    text: str = ""
    errors: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False
    id: str = field(default="", compare=False)
    last_id: str = field(default="", compare=False)
    num_fetched: int = field(default=0, compare=False)


def body(number: int, *, stream: bool) -> dict[str, Any]:
    """The same request for the same number, always with the same answer, of always the same length."""
    return {
        "model": "demo",
        "prompt": f"Story {number}: once upon a time",
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": stream,
    }


async def plain(client: httpx.AsyncClient, number: int) -> str:
    """The text of the answer; anything but an answer fails with what it was."""
    response = await client.post("/v1/completions", json=body(number, stream=False))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def streamed(client: httpx.AsyncClient, number: int, seen: Streamed | None = None) -> Streamed:
    """Read to the end. Raises what httpx raises where the connection was cut.  seen: is told what comes, as it comes"""
    seen = Streamed() if seen is None else seen
    await _read(client.stream("POST", "/v1/completions", json=body(number, stream=True)), seen)
    return seen


async def fetched(client: httpx.AsyncClient, number: int, seen: Streamed) -> Streamed:
    """Read to the end, and fetch the rest where the connection is cut, as soon as anybody answers."""
    events = {"accept": "text/event-stream"}
    reading = client.stream("POST", "/v1/completions", json=body(number, stream=True), headers=events)
    deadline = time.monotonic() + REPLACED_TIMEOUT_S
    while not seen.is_done:
        with suppress(httpx.TransportError):
            await _read(reading, seen)
        if not seen.is_done:
            assert time.monotonic() < deadline, f"seen last: {seen}"
            await asyncio.sleep(0.1)
            seen.num_fetched += 1
            headers = events | {"last-event-id": seen.last_id}
            reading = client.stream("GET", f"/v1/completions/{seen.id}", headers=headers)
    return seen


async def _read(reading: AbstractAsyncContextManager[httpx.Response], seen: Streamed) -> None:
    """Read what comes. A router that is just there may have no replicas yet."""
    async with reading as response:
        if response.status_code in (502, 503, 504) or (response.status_code == 404 and seen.id):
            return
        assert response.status_code == 200, await response.aread()
        last_id = ""
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                last_id = line.removeprefix("id: ")
            data = line.removeprefix("data: ")
            if not line.startswith("data: "):
                continue
            seen.last_id = last_id
            if data == "[DONE]":
                seen.is_done = True
            elif "error" in (chunk := json.loads(data)):
                seen.errors.append(chunk["error"])
            else:
                seen.id = chunk["id"]
                seen.text += "".join(choice["text"] for choice in chunk["choices"])


def cards() -> list[ReplicaCard]:
    """What the replicas of `demo` say of themselves now."""
    handle = serve.get_deployment_handle("Model", "demo")
    answers = handle.broadcast("hello", "test").results(timeout_s=10, return_exceptions=True)
    return [answer for answer in answers if isinstance(answer, ReplicaCard)]


def running() -> list[int]:
    """Sequences that are computed now, per replica."""
    return [card.load.num_running for card in cards()]


def until(look: Callable[[], Seen], *, holds: Callable[[Seen], bool]) -> Seen:
    """Look until it holds, and fail with what was seen last where it never does."""
    deadline = time.monotonic() + REPLACED_TIMEOUT_S
    while not holds(seen := look()):
        assert time.monotonic() < deadline, f"seen last: {seen}"
        time.sleep(0.02)
    return seen


async def both_replicas_are_there() -> None:
    """Whatever happened to one before."""
    await asyncio.to_thread(until, cards, holds=lambda found: len(found) == 2)


async def everybody_is_running(num_requests: int) -> None:
    """All of them at once, and on both replicas."""
    holds = _are_all_running(num_requests)
    await asyncio.to_thread(until, running, holds=holds)


def _are_all_running(num_requests: int) -> Callable[[Sequence[int]], bool]:
    return lambda found: len(found) == 2 and min(found) > 0 and sum(found) == num_requests


def signal_a_replica(number: signal.Signals, application: str = "demo", deployment: str = "Model") -> int:
    """Send it to the process of one of them; returns its process id."""
    from ray.serve.context import _get_global_client  # `serve.status` leaves the processes out

    details = _get_global_client().get_serve_details()
    pid = int(details["applications"][application]["deployments"][deployment]["replicas"][0]["pid"])
    os.kill(pid, number)
    return pid
