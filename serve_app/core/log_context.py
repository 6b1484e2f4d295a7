"""Log context: which clients' requests the work at hand is for, so that log lines can name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MAX_NAMED = 32
"""A line names so many requests at most."""
REQUEST_IDS: ContextVar[tuple[str, ...]] = ContextVar("request_ids", default=())
"""The ids that clients know their requests by; none where the work is for nobody in particular."""


@contextmanager
def log_context(client_request_ids: Iterable[str]) -> Iterator[None]:
    """Mark the work inside, and in threads that inherit its context, as done for these requests."""
    token = REQUEST_IDS.set(distinct(client_request_ids))
    try:
        yield
    finally:
        REQUEST_IDS.reset(token)


def about(client_request_ids: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the `extra` of a log line about these requests, for code outside any log context."""
    return {"request_ids": distinct(client_request_ids)}


def distinct(client_request_ids: Iterable[str]) -> tuple[str, ...]:
    """Return each id once, at most `MAX_NAMED`; empty ids are left out."""
    found: dict[str, None] = {}
    for each in client_request_ids:
        if each and len(found) < MAX_NAMED:
            found[each] = None
    return tuple(found)
