"""Requests at the doors of several hosts while one of them fares ill, and what their clients got."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.cluster.faults import TIMEOUT_S, Streamed, plain, streamed
from tests.cluster.kills import logged_in
from tests.nodes.hosts import Host
from tests.nodes.service import Service

NUM_STREAMS = 12
RIGHT, TOLD, CUT, WRONG = "right", "told", "cut", "wrong"
"""The undisturbed text; an error that says so; a connection that broke off, as its client sees; another text."""


@dataclass(slots=True, kw_only=True)
class Fared:
    """What clients got. streams: by the id of the request;  full_s: seconds from the end of the fault"""

    plain: Counter[str] = field(default_factory=Counter)
    streams: dict[str, str] = field(default_factory=dict)
    slowest_s: float = 0.0
    full_s: float = 0.0


async def under(
    service: Service, doors: tuple[str, ...], fault: Callable[[], object], *, series: str, is_over: Callable[[], object]
) -> Fared:
    """Streams begin at these doors, then the fault comes, and plain requests are asked there until all is well again.

    fault:   blocks until it is over: what was switched off is on again
    series:  begins the ids of the streams
    is_over: whether all is well again, beside the service being full
    """
    fared, is_well = Fared(), asyncio.Event()
    right = await undisturbed(service)
    seen = [Streamed() for _ in range(NUM_STREAMS)]

    async def stream(number: int) -> None:
        name = f"{series}-{number}"
        async with client(service, doors[number % len(doors)], {"x-request-id": name}) as asking:
            fared.streams[name] = await _outcome(_whole(asking, number, seen[number]), right[number])

    async def ask_on(door: str) -> None:
        number = 0
        while not is_well.is_set():
            began = time.monotonic()
            async with client(service, door) as asking:
                fared.plain[await _outcome(plain(asking, number), right[number])] += 1
            fared.slowest_s = max(fared.slowest_s, time.monotonic() - began)
            number = (number + 1) % NUM_STREAMS

    streams = [asyncio.create_task(stream(number)) for number in range(NUM_STREAMS)]
    while not all(each.text for each in seen):
        assert not any(each.done() for each in streams), fared.streams
        await asyncio.sleep(0.02)
    asking = [asyncio.create_task(ask_on(door)) for door in doors]
    await asyncio.to_thread(fault)
    began = time.monotonic()
    await asyncio.to_thread(service.until, lambda: is_over() and service.is_full(), "full again")
    fared.full_s = time.monotonic() - began
    is_well.set()
    await asyncio.gather(*streams, *asking)
    return fared


async def undisturbed(service: Service) -> list[str]:
    async with client(service, "head") as asking:
        return await asyncio.gather(*(plain(asking, number) for number in range(NUM_STREAMS)))


def client(service: Service, door: str, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    (url,) = service.urls(door)
    told = {"authorization": f"Bearer {service.key}", **(headers or {})}
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=told)


async def _whole(asking: httpx.AsyncClient, number: int, seen: Streamed) -> str:
    await streamed(asking, number, seen)
    assert not seen.errors, seen.errors
    if not seen.is_done:
        raise httpx.ReadError("the stream ended without its end")
    return seen.text


async def _outcome(asked: Awaitable[str], right: str) -> str:
    try:
        return RIGHT if await asked == right else WRONG
    except AssertionError:
        return TOLD
    except httpx.HTTPError:
        return CUT


def answered_by(host: Host) -> set[str]:
    """The ids of all requests that a router of the host was done with."""
    folders: list[Path] = list((host.folder / "tmp" / "ray").glob("session_2*/logs"))
    return set(logged_in(folders))
