"""A model's replicas follow the work: one more under load, none without it, and one again for the first request."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from serve_app.cli.processes import send
from serve_app.deployments.autoscaling import POLICY
from tests.cluster.faults import TIMEOUT_S, Streamed, body, streamed
from tests.cluster.kills import ROUTER
from tests.cluster.started import Started

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process belongs to is told by /proc"),
]

SCALING = {
    "min_replicas": 0,
    "initial_replicas": 1,
    "max_replicas": 2,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 1,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2,
    "downscale_to_zero_delay_s": 5,
    "policy": {"policy_function": POLICY},
}
"""What tests must not wait for."""
NUM_BUSY = 12
"""Streams at once that are more than a replica's share."""
NOTHING = {"id": "demo", "wanted": 0, "starting": 0, "draining": 0}
NUM_CALM = 2
"""Streams at once that one replica is enough for."""


def follow(content: dict[str, Any]) -> None:
    router, model = (application["deployments"][0] for application in content["applications"])
    router["user_config"]["max_open_requests"] = 4096
    del model["num_replicas"]
    model |= {"autoscaling_config": SCALING, "graceful_shutdown_timeout_s": 60}
    content["applications"][1]["args"]["max_num_sequences"] = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("following"), follow)
    yield started
    started.end()


async def test_replicas_follow_the_work_to_two_to_none_and_back_and_no_stream_is_cut(run: Started) -> None:
    await asyncio.to_thread(run.until_ready)
    async with httpx.AsyncClient(base_url=run.url, timeout=TIMEOUT_S) as client:
        right = [await streamed(client, number) for number in range(NUM_BUSY)]
        starting: list[int] = []

        def are_two(now: dict[str, Any]) -> bool:
            starting.extend(each["starting"] for each in now["scales"] if each["wanted"] == 2)
            return len(now["replicas"]) == 2

        seen = await streams_until(client, NUM_BUSY, holds=are_two)
        assert max(starting) == 1
        seen += await streams_until(client, NUM_CALM, holds=lambda now: len(now["replicas"]) == 1)
        assert [stream for number, stream in seen if stream != right[number] or not stream.is_done] == []
        assert len(seen) > 2 * NUM_BUSY
        await until(client, lambda now: now["asleep"] == ["demo"] and now["scales"] == [NOTHING])
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["demo"]
        await asyncio.sleep(3)  # as long as a replica that was stopped may still be greeted
        assert await moment(client) | {"at": 0} == await moment(client) | {"at": 0, "asleep": ["demo"], "replicas": []}
        [router] = [each for each in run.processes() if ROUTER in each.command]
        assert send(router, signal.SIGKILL)
        await asyncio.to_thread(run.until, lambda: sleeps(run.url))
        [listed] = (await client.get("/v1/models")).json()["data"]
        assert (listed["id"], listed["root"]) == ("demo", "builtin:demo"), "a router that never saw it knows its file"
        first = await client.post("/v1/completions", json=body(0, stream=False))
        assert (first.status_code, first.json()["choices"][0]["text"]) == (200, right[0].text)
        assert len((await moment(client))["replicas"]) == 1


def sleeps(url: str) -> bool:
    """Ask a router that may only be starting."""
    with suppress(httpx.HTTPError, ValueError, KeyError):
        return bool(httpx.get(f"{url}/live", timeout=TIMEOUT_S).json()["asleep"] == ["demo"])
    return False


async def streams_until(
    client: httpx.AsyncClient, num_at_once: int, *, holds: Callable[[dict[str, Any]], bool]
) -> list[tuple[int, Streamed]]:
    """Keep so many streams running until what the router tells holds, and let them end; return each with its number."""
    seen: list[tuple[int, Streamed]] = []
    is_over = asyncio.Event()

    async def one_after_another(number: int) -> None:
        while not is_over.is_set():
            seen.append((number, await streamed(client, number)))

    async with asyncio.TaskGroup() as group:
        for number in range(num_at_once):
            group.create_task(one_after_another(number))
        await until(client, holds)
        is_over.set()
    return seen


async def until(client: httpx.AsyncClient, holds: Callable[[dict[str, Any]], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S * 2):
        while not holds(await moment(client)):  # noqa: ASYNC110 # of another process
            await asyncio.sleep(0.1)


async def moment(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/live")).json()
    return found
