"""Clients of two tenants that ask without end, and all that they know of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from serve_app.router.accounting import NUM_SPECIAL
from tests.agreement import usage_of

TENANTS = ("acme", "beta")
CLIENTS = 6
PATIENCE_S = 60.0


@dataclass(slots=True)
class Request:
    """What its client knows of it, as `Asked`.

    began_at, ended_at: by the monotonic clock, seconds
    has_left: its client, before it was answered
    """

    name: str
    tenant: str
    most: tuple[int, int]
    began_at: float = 0.0
    ended_at: float = 0.0
    usage: tuple[int, int] | None = None
    repeats: str = ""
    has_left: bool = False


@dataclass(slots=True)
class Heard:
    """What clients know. series: begins the names of their requests;  statuses: of all, or why there was none"""

    series: str
    requests: list[Request] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)


@asynccontextmanager
async def clients(url: str, keys: dict[str, str], heard: Heard, *, share_leaving: float) -> AsyncIterator[None]:
    """While this is entered they ask; behind it all have been answered, or have left."""
    is_over = asyncio.Event()

    async def ask_on(number: int) -> None:
        drawn, count = random.Random(f"{heard.series}-{number}"), 0
        while not is_over.is_set():
            count += 1
            await ask_something(url, keys, heard, f"{heard.series}-{number}-{count}", drawn, share_leaving)
            await asyncio.sleep(0.02)

    asking = [asyncio.create_task(ask_on(number)) for number in range(CLIENTS)]
    try:
        yield
    finally:
        is_over.set()
        await asyncio.gather(*asking)


async def ask_something(
    url: str, keys: dict[str, str], heard: Heard, name: str, drawn: random.Random, share_leaving: float
) -> None:
    """A whole answer or a stream, of the base or of an adapter, of one completion or of two; sometimes again under its
    key, beside it or behind it; and some leave before the end.
    """
    tenant, body = drawn.choice(TENANTS), drawn_body(drawn, name)
    headers = {"authorization": f"Bearer {keys[tenant]}"}
    most = len(body["prompt"]) + NUM_SPECIAL, body["n"] * body["max_tokens"]
    patience_s = drawn.uniform(0.02, 0.5) if drawn.random() < share_leaving else PATIENCE_S
    first, again = (Request(each, tenant, most) for each in (name, f"{name}-again"))
    heard.requests.append(first)
    is_repeated, is_at_once = drawn.random() < 0.25, drawn.random() < 0.5
    if is_repeated:
        headers["idempotency-key"] = name
        heard.requests.append(again)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, headers=headers) as client:
        asking = asyncio.create_task(ask(client, body, first, again, heard, patience_s=patience_s))
        if not (is_repeated and is_at_once):
            await asking
        if is_repeated:
            await ask(client, body, again, first, heard)
        await asking


def drawn_body(drawn: random.Random, name: str) -> dict[str, Any]:
    stream = {"stream": True, "stream_options": {"include_usage": True}} if drawn.random() < 0.5 else {}
    return {
        "model": drawn.choice(["demo", "demo:pirate"]),
        "prompt": f"Tell me of {name}. " * drawn.randint(1, 3),
        "max_tokens": drawn.randint(1, 60),
        "n": drawn.randint(1, 2),
        "ignore_eos": True,
        **stream,
    }


async def ask(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    request: Request,
    other: Request,
    heard: Heard,
    *,
    patience_s: float = PATIENCE_S,
) -> None:
    """other: whose answer it gets where it is told that it is given one again"""
    request.began_at = time.monotonic()
    try:
        async with asyncio.timeout(patience_s):
            answer = await client.post("/v1/completions", json=body, headers={"x-request-id": request.name})
        heard.statuses[str(answer.status_code)] += 1
        request.usage = usage_of(answer)
        if "idempotency-replayed" in answer.headers:
            request.repeats = other.name
    except (httpx.HTTPError, TimeoutError) as error:
        heard.statuses[type(error).__name__] += 1
        request.has_left = isinstance(error, TimeoutError | httpx.TimeoutException)
    request.ended_at = time.monotonic()
