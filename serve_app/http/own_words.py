"""Says in our own words what Serve says in plain text, where no router was there to answer.

Serve refuses what is more than `max_queued_requests`, gives up after `request_timeout_s`, and says nothing at all where
the router that had a request has died: its server then answers 500. A client is told each as everything else: by an
error in its dialect, with a Retry-After where the request may be repeated.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.dialects.tables import HEADER, UNION
from serve_app.core.errors import DeadlineExceeded, Overloaded, ServeError, Unavailable
from serve_app.http.failures import request_id_of
from serve_app.http.refusals import dialect_heard, error_response

DIALECT = HEADER.lower().encode()
PLAIN = b"text/plain"
BUSY_RETRY_S = 2
LOST_RETRY_S = 1


class InOurWords:
    """ASGI middleware of a proxy. What an application says is passed on as it is, other people's too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = is_said = False

        async def say(error: ServeError) -> None:
            response = error_response(error, dialect_heard(scope, UNION))
            response.headers["x-request-id"] = request_id_of(Headers(scope=scope).get("x-request-id", ""))
            await response(scope, receive, send)

        async def sending(message: Message) -> None:
            nonlocal has_started, is_said
            if message["type"] == "http.response.start":
                has_started = True
                if error := meant_by(message):
                    is_said = True
                    await say(error)
            if not is_said:
                await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            if not has_started:  # nobody reads it where the client has left
                await say(_lost())


def meant_by(start: Message) -> ServeError | None:
    """What Serve means by a response that begins so; None where it is an application's."""
    headers = dict(tuple(each) for each in start.get("headers", ()))
    if DIALECT in headers or not headers.get(b"content-type", b"").startswith(PLAIN):
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


def _lost() -> Unavailable:
    return Unavailable("The router that had the request was lost; retry.", None, {"retry_after_s": LOST_RETRY_S})
