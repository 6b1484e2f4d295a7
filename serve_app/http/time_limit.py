"""The time that a client gives its request: it may only be less than what the server gives it."""

from __future__ import annotations

import math

from starlette.datastructures import Headers

from serve_app.api.error_text import shown
from serve_app.core.errors import InvalidRequest

NAME = "X-Request-Timeout"


def time_limit_of(headers: Headers) -> float | None:
    """Seconds; None where nothing is said. Raises InvalidRequest where that is no positive number."""
    text = headers.get(NAME)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest.refusing(NAME, must="be a number of seconds above 0", found=shown(text))
    return seconds
