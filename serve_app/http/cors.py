"""Lets web pages of configured origins call the service from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from serve_app.api.dialects.tables import HEADER
from serve_app.api.response_headers import IGNORED, SEED, SUFFIX_MODE, TRUNCATED, UNENFORCED

READABLE = (HEADER, IGNORED, SEED, SUFFIX_MODE, TRUNCATED, UNENFORCED, "x-request-id", "retry-after")
PREFLIGHT_S = 600
"""How long a browser may remember the answer to a preflight."""


def cors(origins: Sequence[str]) -> list[Middleware]:
    """What answers preflights and marks responses; nothing where no origin is configured.

    A key is sent as a header by the page's own script, so no cookies are allowed.
    """
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=list(READABLE),
            max_age=PREFLIGHT_S,
        )
    ]
