"""Requests of four kinds by the `openai` client, and what became of each: right, told, wrong or silent."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import httpx
import openai
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

NUM_REQUESTS = 24
"""Of each kind; half of them run when the fault begins, and half come while it lasts."""
PATIENCE_S = 150.0
"""An answer that takes longer is a silence."""
GONE_S = 60.0
"""A service whose port nobody listens on for so long is not asked for a stream again: it has ended."""
COMPLETION: dict[str, Any] = {"model": "demo", "max_tokens": 400, "temperature": 0.9}
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string", "minLength": 160}}, "required": ["place"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "go", "parameters": PARAMETERS, "strict": True}}

Answer = dict[int, tuple[str, str | None]]
"""By choice: all that it says, and why it ended; None is a choice without an end."""
Begun = Callable[[bool], None]
"""Told that an answer comes, and whether it was asked for again."""
Result = TypeVar("Result")


async def nothing() -> None: ...


async def plain(client: openai.AsyncOpenAI, number: int, begun: Begun) -> Answer:
    begun(False)
    answer = await client.completions.create(**COMPLETION, prompt=f"Story {number}: once", seed=number)
    return {each.index: (each.text, each.finish_reason) for each in answer.choices}


async def batch(client: openai.AsyncOpenAI, number: int, begun: Begun) -> Answer:
    begun(False)
    prompts = [f"Story {number}, part {part}: once" for part in range(4)]
    answer = await client.completions.create(**COMPLETION | {"max_tokens": 100}, prompt=prompts, seed=number)
    return {each.index: (each.text, each.finish_reason) for each in answer.choices}


async def stream(client: openai.AsyncOpenAI, number: int, begun: Begun) -> Answer:
    chunks = await client.completions.create(**COMPLETION, prompt=f"Story {number}: once", seed=number, stream=True)
    return await followed(client, "/completions", Completion, chunks, begun)


async def chat_with_tools(client: openai.AsyncOpenAI, number: int, begun: Begun) -> Answer:
    """Of the tool that it must call, the arguments."""
    chunks = await client.chat.completions.create(
        **COMPLETION,
        messages=[{"role": "user", "content": f"Where do I go on day {number}?"}],
        tools=[TOOL],  # type: ignore[list-item]
        tool_choice={"type": "function", "function": {"name": "go"}},
        seed=number,
        stream=True,
    )
    return await followed(client, "/chat/completions", ChatCompletionChunk, chunks, begun)


async def followed(client: openai.AsyncOpenAI, path: str, kind: type[Any], chunks: Any, begun: Begun) -> Answer:
    """All that a stream says. One that breaks off is asked for again by its id, from its beginning."""
    response_id, is_again = None, False
    while True:
        found: Answer = {}
        try:
            async for chunk in chunks:
                begun(is_again)
                response_id = chunk.id
                for each in chunk.choices:
                    found[each.index] = found.get(each.index, ("", None))[0] + text_of(each), each.finish_reason
            return found
        except (httpx.TransportError, openai.APIConnectionError) as error:
            if response_id is None:
                raise
            chunks, is_again = await again(client, f"{path}/{response_id}", kind, error), True


async def again(client: openai.AsyncOpenAI, path: str, kind: type[Any], broken: Exception) -> Any:
    """The stream of that id, as soon as a router accepts connections. Raises how it broke off where it is not kept."""
    heard_at = time.monotonic()
    while True:
        try:
            return await client.get(path, cast_to=kind, stream=True, stream_cls=openai.AsyncStream[kind])
        except openai.NotFoundError:
            raise broken from broken.__cause__
        except openai.InternalServerError:
            heard_at = time.monotonic()
        except openai.APIConnectionError:
            if time.monotonic() - heard_at > GONE_S:
                raise
        await asyncio.sleep(0.5)


def text_of(choice: Any) -> str:
    if hasattr(choice, "text"):
        return choice.text or ""
    return "".join(call.function.arguments or "" for call in choice.delta.tool_calls or () if call.function)


KINDS: Mapping[str, Callable[[openai.AsyncOpenAI, int, Begun], Awaitable[Answer]]] = {
    "stream": stream,
    "plain": plain,
    "batch": batch,
    "chat with tools": chat_with_tools,
}


@dataclass(slots=True)
class Asked:
    """What became of the requests of all kinds.

    answers: by kind and number, or what was said in their place
    took_s:  by kind and number
    again:   kinds and numbers of streams that broke off and were asked for by their id
    """

    answers: dict[tuple[str, int], Answer | Exception] = field(default_factory=dict)
    took_s: dict[tuple[str, int], float] = field(default_factory=dict)
    again: set[tuple[str, int]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Seen:
    """How the requests of a kind ended.

    again: those of the right ones that broke off and were asked for by their id
    told: by the words in which they were;  late_s: of the latest, beyond its own
    """

    right: int
    again: int
    told: Counter[str]
    wrong: int
    silent: int
    late_s: float


async def ask_all(
    clients: Sequence[openai.AsyncOpenAI], *, meanwhile: Callable[[], Awaitable[Result | None]] = nothing
) -> tuple[Asked, Result | None]:
    """Half of all; once half of those streams have begun, `meanwhile` beside the other half. Returns what that does."""
    asked, begun, is_half = Asked(), set[int](), asyncio.Event()

    def note(kind: str, number: int, is_again: bool) -> None:
        if is_again:
            asked.again.add((kind, number))
        if kind == "stream":
            begun.add(number)
        if len(begun) >= NUM_REQUESTS // 4:
            is_half.set()

    async def ask(kind: str, number: int) -> None:
        start = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                client, begin = clients[number % len(clients)], partial(note, kind, number)
                asked.answers[kind, number] = await KINDS[kind](client, number, begin)
        except (openai.OpenAIError, httpx.HTTPError, TimeoutError) as error:
            asked.answers[kind, number] = error
        note(kind, number, False)  # where nothing came
        asked.took_s[kind, number] = time.monotonic() - start

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_REQUESTS):
            if number == NUM_REQUESTS // 2:
                await is_half.wait()
                happens = asyncio.ensure_future(meanwhile())
                await asyncio.sleep(1.0)
            for kind in KINDS:
                group.create_task(ask(kind, number))
    return asked, await happens


def judged(kind: str, asked: Asked, undisturbed: Asked) -> Seen:
    told, ends = Counter[str](), Counter[str]()
    for number in range(NUM_REQUESTS):
        answer, own = asked.answers[kind, number], undisturbed.answers[kind, number]
        assert not isinstance(own, Exception), f"{kind} {number} without a fault: {own!r}"
        if isinstance(answer, TimeoutError | openai.APITimeoutError | httpx.TimeoutException):
            ends["silent"] += 1
        elif isinstance(answer, Exception):
            told[words(answer)] += 1
        elif answer == own:
            ends["right"] += 1
            ends["again"] += (kind, number) in asked.again
        else:
            has_ended = answer.keys() == own.keys() and all(reason is not None for _, reason in answer.values())
            ends["wrong" if has_ended else "silent"] += 1
    late_s = max(took_s - undisturbed.took_s[at] for at, took_s in asked.took_s.items() if at[0] == kind)
    return Seen(ends["right"], ends["again"], told, ends["wrong"], ends["silent"], late_s)


def words(error: Exception) -> str:
    """Status and code of what the service said, or how the connection ended."""
    if isinstance(error, openai.APIStatusError):
        return f"{error.status_code} {error.code or 'without a code'}"
    if isinstance(error, openai.APIError) and error.code:
        return f"event {error.code}"
    cause = error.__cause__ if isinstance(error, openai.APIConnectionError) else error
    name = type(cause).__name__  # and not its class: the client may have an httpx of its own
    broken = dict.fromkeys(("RemoteProtocolError", "ReadError"), "connection broken")
    return {**broken, "ConnectError": "connection refused"}.get(name, name)
