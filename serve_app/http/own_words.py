"""Says in our own words what Serve says in plain text, where no router was there to answer.

Serve refuses what is more than `max_queued_requests`, gives up after `request_timeout_s`, and says nothing at all where
the router that had a request has died: its server then answers 500. While the service starts and stops no application
has a route, and Serve answers 404. A client is told each as everything else: by an error in its dialect, with a
Retry-After where the request may be repeated.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.dialects import HEADER, UNION
from serve_app.api.error_text import shown
from serve_app.api.paths import Path
from serve_app.core.errors import DeadlineExceeded, NotFound, Overloaded, ServeError, Unavailable
from serve_app.http.failures import request_id_of
from serve_app.http.refusals import dialect_heard, error_response

DIALECT = HEADER.lower().encode()
PLAIN = b"text/plain"
BUSY_RETRY_S = 2
LOST_RETRY_S = 1
NO_ROUTE_RETRY_S = 2
BEGINNING_S = 1.0
"""So long a request waits for an application that never answered anything."""
ROUTES = "/-/routes"
"""Where Serve lists its applications to anybody who asks. A client's request for it goes on to the router as any other
address, and so needs a key where keys are asked for."""


@dataclass(slots=True, kw_only=True)
class Beginning:
    """What a proxy knows of the service's start.

    is_over:  whether an application has answered it anything
    question: how one is, which it answers once it has a replica
    """

    is_over: bool = False
    question: asyncio.Task[object] | None = None


class InOurWords:
    """ASGI middleware of a proxy. What an application says is passed on as it is, other people's too.

    beginning: of all requests of this proxy; None where the applications were there before it
    """

    def __init__(self, app: ASGIApp, beginning: Beginning | None = None) -> None:
        self._app = app
        self._beginning = beginning or Beginning(is_over=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = is_said = False
        if _own_path(scope) == ROUTES:
            scope = {**scope, "path": f"{scope['path']}/", "raw_path": f"{scope['path']}/".encode()}

        async def say(error: ServeError) -> None:
            response = error_response(error, dialect_heard(scope, UNION))
            response.headers["x-request-id"] = request_id_of(Headers(scope=scope).get("x-request-id", ""))
            await response(scope, receive, send)

        async def sending(message: Message) -> None:
            nonlocal has_started, is_said
            if message["type"] == "http.response.start":
                has_started = True
                if error := meant_by(message) or await self._meant_by_404(scope, message):
                    is_said = True
                    await say(error)
            if not is_said:
                await send(message)

        if not self._beginning.is_over and not await self._has_begun(scope):
            await say(_absent())
            return
        try:
            await self._app(scope, receive, sending)
        finally:
            if not has_started:  # nobody reads it where the client has left
                await say(_lost())

    async def _meant_by_404(self, scope: Scope, start: Message) -> ServeError | None:
        """Say what Serve means by a 404; None where the application that has this route says it."""
        if start["status"] != 404 or not _is_plain(start):
            return None
        routes = await self._routes(scope)
        path = _own_path(scope).rstrip("/")
        if routes is None or any(f"{path}/".startswith(f"{route.rstrip('/')}/") for route in routes):
            return None
        if routes:
            return NotFound(f"There is no route {shown(scope['path'])}.")
        self._beginning.is_over = False
        return _absent()

    async def _has_begun(self, scope: Scope) -> bool:
        """Return whether an application answers: one without replicas yet would keep the request waiting."""
        beginning = self._beginning
        if beginning.question is None:
            routes = await self._routes(scope)
            if not routes:
                return False
            asking = self._ask(scope, f"{routes[0].rstrip('/')}{Path.HEALTH}")
            beginning.question = asyncio.get_running_loop().create_task(asking)
        question = beginning.question
        await asyncio.wait([question], timeout=BEGINNING_S)
        if question.done():  # the first of those who waited for it says so for all
            beginning.is_over, beginning.question = question.exception() is None, None
        return beginning.is_over

    async def _routes(self, scope: Scope) -> tuple[str, ...] | None:
        """Return the routes of all applications as Serve lists them; None where whoever is asked is not Serve."""
        status, said = await self._ask(scope, ROUTES)
        if status == 200:
            return tuple(json.loads(said))
        return () if status == 503 else None

    async def _ask(self, scope: Scope, path: str) -> tuple[int, bytes]:
        """Return the status and body of a GET of the proxy's own, over the connection of this scope."""
        status, said, bodies = 0, b"", [b""]

        async def receive() -> Message:
            if not bodies:
                await asyncio.Event().wait()  # Serve asks on until it has answered
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def hear(message: Message) -> None:
            nonlocal status, said
            status, said = message.get("status", status), said + message.get("body", b"")

        path = scope.get("root_path", "") + path
        asked = {"method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
        await self._app({**scope, **asked}, receive, hear)
        return status, said


def meant_by(start: Message) -> ServeError | None:
    """What Serve means by a response that begins so; None where it is an application's."""
    if not _is_plain(start):
        return None
    match start["status"]:
        case 408:
            return DeadlineExceeded("The request was not answered within the server's request_timeout_s.")
        case 429 | 503:
            message = "More requests wait for a router than may, or there is none; retry."
            return Overloaded(message, None, {"retry_after_s": BUSY_RETRY_S})
        case 500:
            return _lost()
        case _:
            return None


def _own_path(scope: Scope) -> str:
    """The path below the one that the proxy serves under."""
    path: str = scope.get("path", "")
    return path.removeprefix(scope.get("root_path", ""))


def _is_plain(start: Message) -> bool:
    """Whether it is in plain text, and not in a dialect of ours."""
    headers = dict(tuple(each) for each in start.get("headers", ()))
    return DIALECT not in headers and headers.get(b"content-type", b"").startswith(PLAIN)


def _absent() -> Unavailable:
    message = "The service is starting or stopping, and no router is there; retry."
    return Unavailable(message, None, {"retry_after_s": NO_ROUTE_RETRY_S})


def _lost() -> Unavailable:
    return Unavailable("The router that had the request was lost; retry.", None, {"retry_after_s": LOST_RETRY_S})
