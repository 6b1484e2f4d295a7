"""A full proxy in memory: connections whose bytes are seen, an application behind them, a turnstile without room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from serve_app.http.proxy import protocol_of
from serve_app.http.shedding import Shedding
from serve_app.http.turnstile import Turnstile, TurnstileSettings
from serve_app.http.untold import told
from serve_app.http.visits import Visit

HOST = b"Host: x\r\nX-Request-Id: mine\r\n"
BODY = b'{"model": "demo", "prompt": "Once"}'
CHUNKED = b"5;a=b\r\n" + BODY[:5] + b"\r\n%x\r\n" % len(BODY[5:]) + BODY[5:] + b"\r\n0\r\nTrailer: x\r\n\r\n"
COUNTED = b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"


def post(rest: bytes = COUNTED, *, path: bytes = b"/v1/completions", version: bytes = b"1.1") -> bytes:
    return b"POST " + path + b" HTTP/" + version + b"\r\n" + HOST + rest


class Wire(asyncio.Transport):
    """The end of a connection, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_paused = False
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += data

    def close(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Echo:
    """An application that answers a path's body when it may, and health always."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.fails = False
        self.refuses_with: tuple[int, bytes] | None = None
        """A status and a Retry-After."""
        self.told: list[int] = []
        self.ids: list[list[bytes]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        self.told.append(told(scope))
        self.headers.append(dict(scope["headers"]))
        self.ids.append([value for name, value in scope["headers"] if name == b"x-request-id"])
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        if scope["path"] != "/health":
            await self.may_answer.wait()
        if self.fails:
            raise RuntimeError("it fails")
        body += message["body"]
        if self.refuses_with is not None:
            status, seconds = self.refuses_with
            headers = [(b"content-length", b"0"), (b"retry-after", seconds)]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


async def closing(line: Line) -> None:
    async with asyncio.timeout(10):
        while not line.wire.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Line:
    """A connection to a proxy, and what came back over it."""

    def __init__(self, turnstile: Turnstile, app: Echo, make: Callable[..., Shedding] | None = None) -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None, proxy_headers=False)
        config.load()
        self.wire = Wire()
        make = make or protocol_of(turnstile)
        self.protocol = make(config=config, server_state=ServerState(), app_state={})
        self.protocol.connection_made(self.wire)

    def send(self, data: bytes) -> None:
        if data and not self.wire.is_closing():
            self.protocol.data_received(data)

    async def send_all(self, *pieces: bytes) -> bytes:
        """What is written once nothing happens any more."""
        for piece in pieces:
            self.send(piece)
            await settle()
        return self.wire.written

    def lose(self) -> None:
        self.wire.close()
        self.protocol.connection_lost(None)


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def statuses(written: bytes) -> list[int]:
    """Of responses that follow each other without a byte too many."""
    found = []
    while written:
        head, _, rest = written.partition(b"\r\n\r\n")
        found.append(int(head.split()[1]))
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert len(rest) >= length
        written = rest[length:]
    return found


class Busy(Turnstile):
    """Full of other connections' requests."""

    def __init__(self, max_requests: int = 1, *, clock: Callable[[], float] = time.monotonic, **settings: Any) -> None:
        super().__init__(TurnstileSettings(max_requests=max_requests, **settings), clock=clock)
        self.guests: list[Visit] = []
        self.fill()

    def fill(self) -> None:
        while not self.is_full():
            self.guests.append(self.enter(lambda: None))

    def make_room(self) -> None:
        self.guests.pop().leave()
