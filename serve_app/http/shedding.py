"""Refuses in Serve's proxy what is more than it can carry, before that costs a call to the router.

To pass a request on costs the proxy and the router milliseconds each; a thousand that come at once would keep both busy
for seconds in which nothing that was let in gets on. A refusal here costs a fraction of one.
"""

from __future__ import annotations

import os

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.dialects.tables import UNION
from serve_app.api.paths import POSTED
from serve_app.core.errors import Overloaded
from serve_app.http.refusals import dialect_heard, error_response
from serve_app.router.admission import Admission, AdmissionSettings

VARIABLE = "SERVE_APP_PROXY_MAX_REQUESTS"
MAX_REQUESTS = 256


def max_requests() -> int:
    """What the environment says. Raises ValueError where that is no positive integer."""
    number = int(os.environ.get(VARIABLE, MAX_REQUESTS))
    if number < 1:
        raise ValueError(f"{VARIABLE} must be at least 1; found {number}")
    return number


class Shedding:
    """ASGI middleware of a proxy: so many requests that compute something at once, streams until their end included.

    What only looks (health, metrics, models) always passes.
    """

    def __init__(self, app: ASGIApp, *, max_requests: int) -> None:
        self._app = app
        self._admission = Admission(dict, AdmissionSettings(max_open_requests=max_requests))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") not in POSTED:
            await self._app(scope, receive, send)
            return
        try:
            ticket = self._admission.enter()
        except Overloaded as error:
            await error_response(error, dialect_heard(scope, UNION))(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            ticket.give_back()
