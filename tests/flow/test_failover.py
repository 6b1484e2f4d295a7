"""A stream whose replicas die at any of its tokens has the tokens of the undisturbed one, of every kind of request."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from serve_app.core.delta import Frame
from serve_app.replica.service import ModelService
from tests.families.sighted import LLAVA, save_sighted
from tests.flow.stack import ROUTER_ID, Stack, running_stack
from tests.flow.test_images import of
from tests.pictures import sent

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@dataclass(slots=True)
class Fate:
    """Replicas die behind so many frames with tokens each, until as many have died as are to.

    life: frames;  num_left: deaths to come;  loses_last: the last frame dies with its replica
    """

    life: int = 0
    num_left: int = 0
    loses_last: bool = False
    num_died: int = 0
    num_frames: int = 0

    def note(self) -> None:
        self.num_frames += 1
        if self.num_left and self.num_frames >= self.life:
            self.num_left, self.num_died, self.num_frames = self.num_left - 1, self.num_died + 1, 0
            raise ConnectionError("the process is gone")


class Mortal:
    """A replica that can die."""

    def __init__(self, service: ModelService, fate: Fate) -> None:
        self._service, self._fate = service, fate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    async def attach(self, router_id: str) -> AsyncGenerator[Frame, None]:
        async with aclosing(self._service.attach(router_id)) as frames:
            async for frame in frames:
                if frame.deltas and self._fate.loses_last:
                    self._fate.note()
                yield frame
                if frame.deltas and not self._fate.loses_last:
                    self._fate.note()


async def told(stack: Stack, path: str, body: Mapping[str, Any], fate: Fate) -> list[Any]:
    """The events of a stream, or the body. The router knows every replica, and none from before."""
    for service in stack.services:
        card = await service.hello(ROUTER_ID)
        stack.fleet.remove(card.replica_id)
    for service in stack.services:
        stack.fleet.put(await service.hello(ROUTER_ID), Mortal(service, fate))
    response = await stack.post({"model": "demo", "stream": True, **body}, path)
    assert response.status_code == 200, response.text
    if not body.get("stream", True):
        return [response.json()]
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]", response.text[-500:]
    return [json.loads(event) for event in events[:-1]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=3, return_hidden_states=True) as made:
        yield made


PIECES = ("text", "content", "reasoning_content", "arguments")
UNLIKE = {"id", "created", "timings", "system_fingerprint", "prompt_tokens_details", "completion_tokens_details"}
"""Named at random, or told of what was cached and guessed, which depends on clocks."""


def joined(events: list[Any]) -> dict[str, Any]:
    """By place in the events: pieces of text and lists put together, all else as it came last."""
    found: dict[str, Any] = {}

    def add(place: str, value: Any) -> None:
        if isinstance(value, dict):
            for name in value.keys() - UNLIKE:
                add(f"{place}/{name}", value[name])
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, dict) and "index" in each:
                    add(f"{place}[{each['index']}]", each)
                else:
                    found.setdefault(place, []).append(each)
        elif isinstance(value, str) and place.rpartition("/")[2] in PIECES:
            found[place] = found.get(place, "") + value
        elif value is not None:
            found[place] = value

    for event in events:
        add("", event)
    return found


def differs(one: Any, other: Any, place: str = "") -> str:
    """Where two differ; numbers may by what a float32 sum over the same terms in another order does."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((found for name in one if (found := differs(one[name], other[name], f"{place}.{name}"))), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next((found for at, (a, b) in pairs if (found := differs(a, b, f"{place}.{at}"))), "")
    if isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5):
        return ""
    return "" if one == other else f"{place}: {one!r} and {other!r}"


PROMPT = "Once upon a time there was a fox who"
CHAT = {"messages": [{"role": "user", "content": "Tell me a story"}]}
SEEDED = {"temperature": 0.9, "seed": 5}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"type": "string", "maxLength": 10}}, "required": ["at"]}}}]  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"], "additionalProperties": False}}}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {"temperature": 0}),
    "seeded": ("/v1/completions", {**SEEDED, "top_p": 0.95, "top_k": 40, "min_p": 0.01}),
    "adapter": ("/v1/completions", {**SEEDED, "model": "demo:pirate"}),
    "several": ("/v1/completions", {**SEEDED, "n": 3}),
    "list": ("/v1/completions", {**SEEDED, "prompt": [PROMPT, "The captain said", "A list of"], "n": 2}),
    "penalties": ("/v1/completions", {**SEEDED, "presence_penalty": 0.7, "frequency_penalty": 0.4,
                                      "repetition_penalty": 1.2}),
    "dry": ("/v1/completions", {**SEEDED, "dry_multiplier": 0.8, "dry_allowed_length": 1}),
    "mirostat": ("/v1/completions", {**SEEDED, "mirostat_mode": 2, "mirostat_tau": 3.0}),
    "mirostat 1": ("/v1/completions", {**SEEDED, "mirostat_mode": 1, "logprobs": 2}),
    "log-probabilities": ("/v1/completions", {**SEEDED, "logprobs": 3, "echo": True}),
    "stops": ("/v1/completions", {**SEEDED, "stop": ["zzzz", "e q"], "min_tokens": 4, "logprobs": 1}),
    "regex": ("/v1/completions", {**SEEDED, "regex": "([a-z]+ ){6}end"}),
    "json": ("/v1/completions", {**SEEDED, "logprobs": 1, "response_format": SCHEMA}),
    "prediction": ("/v1/completions", {"temperature": 0, "prediction": {"type": "content", "content": PROMPT}}),
    "time": ("/v1/completions", {**SEEDED, "t_max_predict_ms": 3_600_000, "n": 2, "stop": ["a", "u"], "min_tokens": 3}),
    "states": ("/v1/completions", {**SEEDED, "n": 2, "return_hidden_states": True}),
    "chat": ("/v1/chat/completions", {**SEEDED, **CHAT, "logprobs": True, "top_logprobs": 2}),
    "tools": ("/v1/chat/completions", {**SEEDED, **CHAT, "n": 2, "tools": TOOLS, "tool_choice": "required"}),
}  # fmt: skip


@pytest.mark.law("Exact failover")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_that_is_cut_anywhere_is_the_undisturbed_one(stack: Stack, kind: str) -> None:
    path, members = KINDS[kind]
    body = {"max_tokens": 14, "stream_options": {"include_usage": True}, **members}
    if "chat" not in path:
        body.setdefault("prompt", PROMPT)
    assert await num_died(stack, path, body) >= 8


async def num_died(stack: Stack, path: str, body: dict[str, Any], *, loses_last: bool = False) -> int:
    """Of the replicas that were to die behind every frame of the answer, which is always the same."""
    expected, found = joined(await told(stack, path, body, Fate())), 0
    for life in range(1, 15):
        fate = Fate(life=life, num_left=2, loses_last=loses_last)
        difference = differs(joined(await told(stack, path, body, fate)), expected)
        assert not difference, f"replicas died behind {life} frames: {difference}"
        found += fate.num_died
    await stack.settled()
    return found


@pytest.mark.law("Exact failover")
async def test_the_best_of_several_are_the_same_whoever_dies_with_some_of_them(stack: Stack) -> None:
    """Nothing of a body is told before its completions end, each at another token here."""
    body = {**SEEDED, "prompt": PROMPT, "max_tokens": 14, "n": 2, "best_of": 5, "stop": ["a", "u", "w"], "logprobs": 1}
    assert await num_died(stack, "/v1/completions", {**body, "stream": False}, loses_last=True) >= 4


@pytest.mark.law("Exact failover")
async def test_a_stream_about_images_that_is_cut_anywhere_is_the_undisturbed_one(tmp_path: Path) -> None:
    save_sighted(LLAVA, tmp_path)
    body = {
        **SEEDED,
        "prompt": "What is <image> beside <image>?",
        "images": [sent(1), sent(2)],
        "max_tokens": 8,
        "n": 2,
    }
    async with running_stack(**(of(tmp_path) | {"num_replicas": 3})) as seeing:
        assert await num_died(seeing, "/v1/completions", {**body, "stream_options": {"include_usage": True}}) >= 8
