"""A stream that is cut anywhere, and fetched at another router, is the undisturbed one, of every kind of request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.types import ASGIApp, Message

from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.families.sighted import LLAVA, save_sighted
from tests.flow.stack import Stack, running_stack
from tests.flow.test_failover import CHAT, PROMPT, SCHEMA, SEEDED, TOOLS, differs, joined
from tests.flow.test_images import of
from tests.pictures import sent

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class House:
    """One set of replicas behind two routers."""

    stack: Stack
    apps: tuple[ASGIApp, ASGIApp]
    fleets: tuple[Fleet, Fleet]


@asynccontextmanager
async def built(**changes: Any) -> AsyncIterator[House]:
    async with running_stack(**changes) as stack:
        other = Fleet("router-1")
        for service in stack.services:
            other.put(await service.hello("router-1"), service)
        yield House(stack, (stack.app, build_app(Router(other))), (stack.fleet, other))
        await other.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[House]:
    async with built(num_replicas=2, return_hidden_states=True) as made:
        yield made


@dataclass(slots=True)
class Reader:
    """Reads a stream event by event, until it has so many; then it leaves without a word."""

    most: int | None = None
    pieces: bytes = b""

    async def read(
        self, app: ASGIApp, path: str, body: Mapping[str, Any] | None = None, last_id: str | None = None
    ) -> list[str]:
        sent, leaves = [body], asyncio.Event()
        headers = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
        if last_id is not None:
            headers.append((b"last-event-id", last_id.encode()))
        status = 0

        async def receive() -> Message:
            if sent:
                content = sent.pop()
                return {"type": "http.request", "body": b"" if content is None else json.dumps(content).encode()}
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            self.pieces += message.get("body", b"")
            if self.most is not None and self.pieces.count(b"\n\n") >= self.most:
                leaves.set()
            await asyncio.sleep(0)

        method = "GET" if body is None else "POST"
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("flow", 80),
        }  # fmt: skip
        await app(scope, receive, send)
        assert status == 200, self.pieces
        return self.pieces.decode().split("\n\n")[:-1][: self.most]


def parsed(events: list[str]) -> tuple[list[Any], str]:
    """The data of events, and the id of the last one."""
    data, last_id = [], ""
    for event in events:
        if event.startswith(":"):
            continue
        first, _, second = event.partition("\n")
        assert first.startswith("id: "), event
        last_id = first.removeprefix("id: ")
        data.append(second.removeprefix("data: "))
    return [json.loads(each) for each in data if each != "[DONE]"], last_id


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/completions", {"temperature": 0}),
    "unseeded": ("/v1/completions", {"temperature": 1.0}),
    "several": ("/v1/completions", {**SEEDED, "n": 2}),
    "list": ("/v1/completions", {**SEEDED, "prompt": [PROMPT, "The captain said", "A list of"]}),
    "adapter": ("/v1/completions", {**SEEDED, "model": "demo:pirate", "echo": True, "suffix": " the end"}),
    "log-probabilities": ("/v1/completions", {**SEEDED, "logprobs": 2, "echo": True, "return_token_ids": True}),
    "mirostat": ("/v1/completions", {**SEEDED, "mirostat_mode": 2, "mirostat_tau": 3.0}),
    "states": ("/v1/completions", {**SEEDED, "return_hidden_states": True}),
    "stops": ("/v1/completions", {**SEEDED, "n": 2, "stop": ["a", "u"], "min_tokens": 3, "logprobs": 1,
                                  "t_max_predict_ms": 3_600_000}),
    "json": ("/v1/completions", {**SEEDED, "response_format": SCHEMA}),
    "prediction": ("/v1/completions", {"temperature": 0, "prediction": {"type": "content", "content": PROMPT}}),
    "models": ("/v1/completions", {**SEEDED, "model": ["demo", "demo:shout"]}),
    "chat": ("/v1/chat/completions", {**SEEDED, **CHAT, "logprobs": True, "top_logprobs": 2}),
    "tools": ("/v1/chat/completions", {**SEEDED, **CHAT, "n": 2, "tools": TOOLS, "tool_choice": "required"}),
}  # fmt: skip


@pytest.mark.law("Resumed streams")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_that_is_cut_anywhere_and_fetched_elsewhere_is_the_undisturbed_one(
    house: House, kind: str
) -> None:
    path, members = KINDS[kind]
    body = {"model": "demo", "stream": True, "max_tokens": 14, "stream_options": {"include_usage": True}, **members}
    if "chat" not in path:
        body.setdefault("prompt", PROMPT)
    await check_cuts(house, path, body, is_drawn_anew=kind == "unseeded")


@pytest.mark.law("Resumed streams")
async def test_a_stream_about_images_that_is_cut_anywhere_is_the_undisturbed_one(tmp_path: Path) -> None:
    save_sighted(LLAVA, tmp_path)
    asked = {"model": "demo", "prompt": "What is <image> beside <image>?", "images": [sent(1), sent(2)]}
    body = {**SEEDED, **asked, "stream": True, "max_tokens": 8, "n": 2, "stream_options": {"include_usage": True}}
    async with built(**(of(tmp_path) | {"num_replicas": 2})) as seeing:
        await check_cuts(seeing, "/v1/completions", body)


async def check_cuts(house: House, path: str, body: dict[str, Any], *, is_drawn_anew: bool = False) -> None:
    """Cut a stream behind each of its events, and read on at the other router."""
    whole, last_id = parsed(await Reader().read(house.apps[0], path, body))
    expected = joined(whole)
    again, _ = parsed(await Reader().read(house.apps[1], f"{path}/{whole[0]['id']}"))
    assert not differs(joined(again), joined(whole)), "one that has ended is told again"
    assert parsed(await Reader().read(house.apps[1], f"{path}/{whole[0]['id']}", last_id=last_id))[0] == []
    for most in range(1, len(whole) + 1):
        begun, last_id = parsed(await Reader(most).read(house.apps[most % 2], path, body))
        rest, last_id = parsed(
            await Reader(4).read(house.apps[1 - most % 2], f"{path}/{begun[0]['id']}", None, last_id)
        )
        rest += parsed(await Reader().read(house.apps[most % 2], f"{path}/{begun[0]['id']}", None, last_id))[0]
        assert {each["id"] for each in rest} <= {begun[0]["id"]}
        told = joined(begun + rest)
        if is_drawn_anew:
            again, _ = parsed(await Reader().read(house.apps[0], f"{path}/{begun[0]['id']}"))
            expected = joined(again)
        found = differs(told, expected)
        assert not found, f"cut behind {most} events: {found}"
    await house.stack.settled()


@pytest.mark.law("Determinism")
async def test_a_captured_completion_that_was_drawn_comes_again_to_the_byte(house: House) -> None:
    body = {
        "model": ["demo", "demo:pirate"],
        "prompt": [PROMPT, "A list of"],
        "temperature": 2.0,  # so that hardly two of them are alike
        "n": 2,
        "max_tokens": 9,
    }
    whole, _ = parsed(await Reader().read(house.apps[0], "/v1/completions", {**body, "stream": True}))
    before = await capsule_of(house.apps[1], whole[0]["id"])
    again, _ = parsed(await Reader().read(house.apps[1], before["path"], {**before["request"], "stream": True}))
    assert (await capsule_of(house.apps[0], again[0]["id"]))["parts"] == before["parts"]
    texts = {choice["text"] for part in before["parts"] for choice in part["choices"]}
    assert len(texts) == 8, "each was drawn"


async def capsule_of(app: ASGIApp, name: str) -> Any:
    reader = Reader()
    await reader.read(app, f"/v1/capsules/{name}")
    return json.loads(reader.pieces)


async def test_a_stream_that_still_runs_is_taken_over(house: House) -> None:
    body = {"model": "demo", "prompt": PROMPT, "stream": True, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    path, first = "/v1/completions", Reader()
    reading = asyncio.create_task(first.read(house.apps[0], path, body))
    while first.pieces.count(b"\n\n") < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    named = json.loads(first.pieces.decode().split("\n")[1].removeprefix("data: "))["id"]
    rest, _ = parsed(await Reader().read(house.apps[1], f"{path}/{named}"))
    *_, error, end = await reading
    assert ('"stream_resumed"' in error, end) == (True, "data: [DONE]")
    whole, _ = parsed(await Reader().read(house.apps[0], path, body))
    assert not differs(joined(rest), joined(whole))
    await house.stack.settled()
