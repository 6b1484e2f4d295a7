"""Has a short body go with its request from a proxy to a router.

A router asks Serve for a request's body by a call back to the proxy, and for what follows it, which is that the client
has left, by another. A short body is there when its request is handed on, nearly always; with that the first call, and
the time in which both are busy with others, is saved.

An application that does not know of it would wait for a body that never comes. So the responses of one that does say
so, and bodies go by themselves until all of the last ones did.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http.shortcut import offered

HEADER = b"x-serve-app-body"
"""Between the two alone: of a client it is taken away."""
TAKEN = "serve_app.takes_bodies"
"""A key of the message with which a response begins, of an application that takes them. No client is sent it."""
MAX_BYTES = 65536
"""Of a body; of longer ones a call is a small part of what they cost."""
NUM_RESPONSES = 16
"""That said so, one after the other, before bodies go with requests: of routers of two versions both answer."""


class Enclosing:
    """Whether the applications behind a proxy take bodies so, by what their responses say."""

    def __init__(self) -> None:
        self._num_taken = 0

    @property
    def is_known(self) -> bool:
        return self._num_taken >= NUM_RESPONSES

    def note(self, start: Message) -> None:
        """How a response begins."""
        self._num_taken = self._num_taken + 1 if start.get(TAKEN) else 0


def without_body(scope: Scope) -> None:
    """Take away what a client sent under this name."""
    scope["headers"] = [each for each in scope["headers"] if each[0] != HEADER]


async def enclose(scope: Scope, receive: Receive) -> Receive:
    """Have the body, all of which is there, go with this request. Returns what gives the messages behind it."""
    message = await receive()
    if message["type"] == "http.request":
        scope["headers"] = [*scope["headers"], (HEADER, message["body"])]
        return receive
    return _behind(message, receive)  # the client has left already


class TakesBodies:
    """ASGI middleware that gives its application the body that came with a request, and has responses say that it does.

    A body without an offer of a way back is a client's that came past every proxy, and is dropped.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        bodies = [value for name, value in scope["headers"] if name == HEADER]
        if bodies:
            without_body(scope)
            if offered(scope) is not None:
                receive = _behind({"type": "http.request", "body": bodies[0], "more_body": False}, receive)

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, TAKEN: True}
            await send(message)

        await self._app(scope, receive, telling)


def _behind(first: Message, receive: Receive) -> Receive:
    """A message, and then what comes."""
    waiting = [first]

    async def received() -> Message:
        return waiting.pop() if waiting else await receive()

    return received
