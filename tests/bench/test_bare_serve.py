"""What the floor sends is what we would send, piece by piece, and at the moments that an engine would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

from starlette.types import Message, Scope

from benchmarks.bare_serve import CHUNK, Door, Pace, Streams
from benchmarks.load import Events
from serve_app.api.responses import Choice, ChunkWriter, ResponseHead, written_choice

HTTP: Scope = {"type": "http"}


class Exchange:
    """One request, in two pieces, and all that was sent for it."""

    def __init__(self, asked: dict[str, object]) -> None:
        body = json.dumps(asked).encode()
        self.sent: list[Message] = []
        self._received: Iterator[Message] = iter(
            [
                {"type": "http.request", "body": body[:5], "more_body": True},
                {"type": "http.request", "body": body[5:], "more_body": False},
            ]
        )

    async def receive(self) -> Message:
        return next(self._received)

    async def send(self, message: Message) -> None:
        self.sent.append(message)


def test_a_piece_is_a_chunk_of_ours() -> None:
    head = ResponseHead(id="cmpl-0123456789abcdef0123456789abcdef", created=1763820000, model="bench-tiny")
    assert ChunkWriter(head, written_choice).choice(Choice(index=0, text=" word")) == CHUNK


async def test_as_many_pieces_are_sent_as_were_asked_for_each_by_itself() -> None:
    exchange = Exchange({"max_tokens": 3})
    await Door(Streams().pieces)(HTTP, exchange.receive, exchange.send)
    start, *pieces, tail = exchange.sent
    assert start["status"] == 200
    assert [each["body"] for each in pieces] == [CHUNK] * 3
    assert all(each["more_body"] for each in pieces)
    assert not tail["more_body"]
    events = Events()
    events.add(b"".join(each["body"] for each in (*pieces, tail)))
    assert events.num_texts == 3
    assert json.loads(events.last[-1])["usage"]["completion_tokens"] == 3


async def test_all_streams_wait_for_the_same_moments() -> None:
    pace = Pace()
    passed: list[str] = []

    async def stream(name: str) -> None:
        for _ in range(3):
            await pace.wait(0.001)
            passed.append(name)

    await asyncio.gather(*(stream(name) for name in "abc"))
    assert [sorted(passed[at : at + 3]) for at in (0, 3, 6)] == [["a", "b", "c"]] * 3


async def test_a_server_is_told_that_it_may_start_and_end() -> None:
    told: list[str] = []
    asked = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Message:
        return next(asked)

    async def send(message: Message) -> None:
        told.append(message["type"])

    await Door(Streams().pieces)({"type": "lifespan"}, receive, send)
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
