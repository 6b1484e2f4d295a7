"""Servers are measured in turns: two small ones that speak the protocol, and one that fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks.checkpoints import words
from benchmarks.compare import Server, measure, readable, report, stopped, turned
from benchmarks.workloads import Workload

SMALL = Workload(name="W1", about="small", concurrency=2, num_requests=3, prompt=4, max_tokens=5)


@contextmanager
def speaking(asked: list[str], name: str, *, is_failing: bool = False) -> Iterator[str]:
    """The address of a server that recites as many tokens as it is asked for, and notes that it was."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append(name)
        if is_failing:
            return web.json_response({"error": {"message": "no"}}, status=500)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(body["max_tokens"]):
            await response.write(b"data: " + json.dumps({"choices": [{"text": f" {number}"}]}).encode() + b"\n\n")
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append((runner, runner.addresses[0][1]))
        ready.set()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()
        loop.run_until_complete(found[0][0].cleanup())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{found[0][1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def test_servers_take_turns_and_the_order_turns() -> None:
    asked: list[str] = []
    with speaking(asked, "a") as first, speaking(asked, "b") as second:
        servers = [Server(name="a", url=first), Server(name="b", url=second)]
        told = report(servers, measure(servers, [SMALL], words(), rounds=2, seed=1))
    warm, whole = ["a"] * 2 + ["a"] * 3, ["b"] * 2 + ["b"] * 3
    assert asked == [*warm, *whole, *["b"] * 3, *["a"] * 3]
    for name in ("a", "b"):
        median = told["W1"]["median"][name]
        assert (median["errors"], median["prompt_tokens"], median["output_tokens"]) == (0, 12, 15)
        assert len(told["W1"]["rounds"][name]) == 2
    assert set(told["W1"]["ratio"]) == {"b"}
    assert "W1" in readable(servers, told)


def test_what_fails_is_counted_and_ends_nothing() -> None:
    asked: list[str] = []
    with speaking(asked, "a", is_failing=True) as url:
        servers = [Server(name="a", url=url)]
        told = report(servers, measure(servers, [SMALL], words(), rounds=1, seed=1))
    assert told["W1"]["median"]["a"]["errors"] == SMALL.num_requests
    assert told["W1"]["median"]["a"]["output_tokens_per_s"] == 0


def test_a_server_is_left_out_where_it_has_no_such_model_or_no_such_round() -> None:
    server = Server(name="a", url="", models={"base": ["m"]}, rounds=1)
    tiny = Workload(name="W8", about="", concurrency=1, num_requests=1, prompt=1, max_tokens=1, kind="tiny")
    assert server.is_measured(SMALL, 0)
    assert not server.is_measured(SMALL, 1)
    assert not server.is_measured(tiny, 0)


def test_every_server_is_first_in_some_round() -> None:
    servers = [Server(name=name, url="") for name in "abc"]
    assert ["".join(each.name for each in turned(servers, turn)) for turn in range(4)] == ["abc", "bca", "cab", "abc"]


def test_a_server_is_spelled_as_an_address_or_told_by_a_file(tmp_path: Path) -> None:
    assert Server.of("ours=http://127.0.0.1:8000/").url == "http://127.0.0.1:8000"
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"name": "other", "url": "http://x", "models": {"base": ["/m"]}, "stops": [7]}))
    told = Server.of(str(file))
    assert (told.models["base"], told.stops, told.models["tiny"]) == (["/m"], (7,), ["bench-tiny"])
    with pytest.raises(ValueError, match="NAME=URL"):
        Server.of("nothing")


@pytest.mark.skipif(not Path("/proc").exists(), reason="the state of a process is read from /proc")
def test_processes_stand_still_until_the_block_ends() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        with stopped(iter([process.pid])):
            wait_for(process.pid, "T")
        wait_for(process.pid, "SR")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(pid: int, states: str) -> None:
    deadline = time.monotonic() + 30
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) not in states:
        assert time.monotonic() < deadline, f"the process is in state {state}"
        time.sleep(0.01)
