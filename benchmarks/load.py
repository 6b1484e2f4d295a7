"""Sends requests to a server from so many workers and notes when what came; as little work for the client as can be."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PATH = "/v1/completions"
TIMEOUT_S = 600.0
MAX_REASON = 200
"""Characters of an error that are kept."""
WITHOUT_TEXT = (b'"text":""', b'"text": ""', b'"choices":[]', b'"choices": []')
END = b"[DONE]"


@dataclass(slots=True)
class Answer:
    """What became of one request. Times are seconds on one clock.

    seen_at: when each event with text came; a text that is not streamed has none
    """

    sent_at: float
    ended_at: float = 0.0
    seen_at: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event with text and the next."""
        return [after - before for before, after in zip(self.seen_at, self.seen_at[1:], strict=False)]


class Events:
    """Takes a stream of events apart, whatever pieces it comes in; of what has no text, only the last are kept."""

    def __init__(self) -> None:
        self.num_texts = 0
        self.last: list[bytes] = []
        self._rest = b""

    def add(self, piece: bytes) -> int:
        """How many events with text ended in this piece."""
        before = self.num_texts
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:") or (data := line[5:].strip()) == END:
                continue
            self.last = [*self.last[-2:], data]
            self.num_texts += not any(mark in data for mark in WITHOUT_TEXT)
        return self.num_texts - before


async def drive(
    url: str, bodies: Iterable[dict[str, Any]], *, concurrency: int, key: str | None = None
) -> list[Answer]:
    """All requests, by so many workers; an answer of each, errors among them."""
    waiting: Iterator[dict[str, Any]] = iter(bodies)
    answers: list[Answer] = []

    async def work(session: aiohttp.ClientSession) -> None:
        for body in waiting:  # one iterator, which all workers take from
            answers.append(await ask(session, url, body))

    async with session_with(key) as session:
        await asyncio.gather(*(work(session) for _ in range(concurrency)))
    return answers


def session_with(key: str | None) -> aiohttp.ClientSession:
    """A session of any number of connections; with the key, if the service asks for one."""
    limits = aiohttp.ClientTimeout(total=TIMEOUT_S)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits, headers=headers)


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    answer = Answer(time.perf_counter())
    try:
        async with session.post(url + PATH, json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status} {await response.text()}"[:MAX_REASON]
            elif body.get("stream"):
                await read_events(answer, response.content)
            else:
                read_usage(answer, await response.json(content_type=None))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = f"{type(error).__name__} {error}"[:MAX_REASON]
    answer.ended_at = time.perf_counter()
    return answer


async def read_events(answer: Answer, content: aiohttp.StreamReader) -> None:
    """Tokens are those of `usage`, and the events with text where a server reports none."""
    events = Events()
    async for piece in content.iter_any():
        now = time.perf_counter()
        answer.seen_at += [now] * events.add(piece)
    answer.output_tokens = events.num_texts
    for data in events.last:
        read_usage(answer, json.loads(data))


def read_usage(answer: Answer, document: dict[str, Any]) -> None:
    if document.get("error"):
        answer.error = json.dumps(document["error"])[:MAX_REASON]
    usage = document.get("usage") or {}
    answer.prompt_tokens = usage.get("prompt_tokens") or answer.prompt_tokens
    answer.output_tokens = usage.get("completion_tokens") or answer.output_tokens
