"""Gives every request an id, and turns whatever goes wrong into a JSON error in the client's dialect."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.dialects import Dialect
from serve_app.core.log_context import log_context
from serve_app.http.refusals import as_serve_error, dialect_heard, error_response

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class FailuresAsJson:
    """ASGI middleware that every request passes.

    The id is the client's own `x-request-id` where that is well formed.
    dialect: of requests that name none
    """

    def __init__(self, app: ASGIApp, *, sends_request_id: bool, dialect: Dialect) -> None:
        self._app = app
        self._sends_request_id = sends_request_id
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope).get("x-request-id", ""))
        scope.setdefault("state", {})["request_id"] = request_id
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                if self._sends_request_id:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            with log_context([request_id]):
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            if has_started:
                raise
            response = error_response(as_serve_error(error, request_id), dialect_heard(scope, self._dialect))
            response.raw_headers.extend(scope["state"].get("beside", ()))
            await response(scope, receive, send_with_id)


def request_id_of(sent: str) -> str:
    """What the client sent where that is well formed, or a new one."""
    return sent if REQUEST_ID.fullmatch(sent) else secrets.token_hex(16)
