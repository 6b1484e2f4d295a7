"""Streams for clients of HTTP/1.0, which know no chunks."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class WholeForHttp10:
    """ASGI middleware that gives a client of HTTP/1.0 a stream in one piece, with its length.

    The server before us would send chunks, which such a client takes for the body; it cannot be told to end the body by
    closing the connection. Whoever wants to see a stream grow has to ask in HTTP/1.1.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_old = scope["type"] == "http" and scope.get("http_version") == "1.0"
        await self._app(scope, receive, Whole(send).send if is_old else send)


class Whole:
    """Keeps a response of unknown length until it has ended."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._pieces: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not _has_length(message):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._send_whole(self._start)

    async def _send_whole(self, start: Message) -> None:
        body = b"".join(self._pieces)
        length = (b"content-length", str(len(body)).encode())
        await self._send({**start, "headers": [*start.get("headers", ()), length]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _has_length(message: Message) -> bool:
    return any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
