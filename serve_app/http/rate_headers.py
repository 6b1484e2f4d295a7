"""OpenAI's headers of limits per minute (https://platform.openai.com/docs/guides/rate-limits)."""

from __future__ import annotations

import math

from serve_app.core.tenants import Meter
from serve_app.router.quotas import Rates

NAMES = {
    meter: tuple(f"x-ratelimit-{told}-{what}".encode() for told in ("limit", "remaining", "reset"))
    for meter, what in ((Meter.REQUESTS, "requests"), (Meter.TOKENS, "tokens"))
}
TOLD_OF_RATES = frozenset(name for names in NAMES.values() for name in names)


def rate_headers(rates: Rates) -> list[tuple[bytes, bytes]]:
    """Of each limit that there is: how much it is, how much is left, and after how long all of it is there again."""
    headers = []
    for meter, rate in rates.items():
        limit, remaining, reset = NAMES[meter]
        headers += [
            (limit, b"%d" % rate.limit),
            (remaining, b"%d" % rate.remaining),
            (reset, duration(rate.reset_s).encode()),
        ]
    return headers


def duration(seconds: float) -> str:
    """As `120ms`, `1s`, `6m0s`, `1h0m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60}m{rest}s"
