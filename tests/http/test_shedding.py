"""A proxy that is full refuses by itself, and what only looks passes."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from serve_app.http.shedding import MAX_REQUESTS, VARIABLE, Shedding, max_requests


class Slow:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_inside += 1
        if scope["path"] != "/health":
            await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def test_more_requests_at_once_than_it_may_carry_are_refused_without_passing_them_on() -> None:
    inner = Slow()
    transport = httpx.ASGITransport(Shedding(inner, max_requests=2))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        inside = [asyncio.create_task(client.post("/v1/completions", content=b"{}")) for _ in range(2)]
        while inner.num_inside < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        refused = await client.post("/v1/completions/", content=b"{}")
        other = await client.post("/completion", headers={"X-Completions-Dialect": "llama.cpp"}, content=b"{}")
        assert (refused.status_code, other.status_code) == (503, 503)
        assert refused.json()["error"]["error_code"] == "overloaded"
        assert json.loads(other.content)["error"] != refused.json()["error"]  # each in its dialect
        assert int(refused.headers["retry-after"]) >= 1
        assert inner.num_inside == 2
        assert (await client.get("/health")).status_code == 200
        inner.may_answer.set()
        assert [(await each).status_code for each in inside] == [200, 200]
        assert (await client.post("/v1/completions", content=b"{}")).status_code == 200


def test_the_environment_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert max_requests() == MAX_REQUESTS
    monkeypatch.setenv(VARIABLE, "7")
    assert max_requests() == 7
    monkeypatch.setenv(VARIABLE, "0")
    with pytest.raises(ValueError, match="at least 1; found 0"):
        max_requests()
