"""What real clients sent over one connection, to be sent again: `clients/<name>.http`, as recorded but for the host."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "clients"
TIMEOUT_S = 60.0
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
IN_CHUNKS = re.compile(rb"\r\ntransfer-encoding: *chunked\r\n", re.IGNORECASE)
LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back to one request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def events(self) -> list[str]:
        return [event.removeprefix("data: ") for event in self.body.decode().split("\n\n")[:-1]]

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The body, or the data of each event but the last one's `[DONE]`."""
        if self.headers["content-type"].startswith("text/event-stream"):
            return [json.loads(event) for event in self.events if event != "[DONE]"]
        return [json.loads(self.body)]

    @property
    def texts(self) -> list[str]:
        """Of each choice, by its index."""
        texts: dict[int, str] = {}
        for part in self.parts:
            for choice in part.get("choices", [part]):
                texts[choice["index"]] = texts.get(choice["index"], "") + choice.get("text", choice.get("content"))
        return [texts[index] for index in sorted(texts)]


def names() -> set[str]:
    return {path.stem for path in FOLDER.glob("*.http")}


def replay(name: str, address: tuple[str, int]) -> list[Answer]:
    """Send all requests of a recording over one connection, each when the one before it is answered."""
    with socket.create_connection(address, TIMEOUT_S) as connection:
        return [_exchange(connection, request) for request in _requests((FOLDER / f"{name}.http").read_bytes())]


def _exchange(connection: socket.socket, request: bytes) -> Answer:
    connection.sendall(request)
    response = HTTPResponse(connection, method=request.split(b" ", 1)[0].decode())
    response.begin()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(status=response.status, headers=headers, body=response.read())


def _requests(sent: bytes) -> Iterator[bytes]:
    while sent:
        end = sent.index(b"\r\n\r\n") + 4
        if IN_CHUNKS.search(sent, 0, end):
            end = sent.index(LAST_CHUNK, end) + len(LAST_CHUNK)
        elif length := LENGTH.search(sent, 0, end):
            end += int(length[1])
        yield sent[:end]
        sent = sent[end:]
