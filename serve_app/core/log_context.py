"""Log context: which clients' requests the work at hand is for, so that log lines can name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice

MAX_NAMED = 32
"""Requests that one log line names at most."""
REQUEST_IDS: ContextVar[tuple[str, ...]] = ContextVar("request_ids", default=())
"""The request ids that clients know; empty if the work is for no request in particular."""


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
    return tuple(islice(dict.fromkeys(filter(None, client_request_ids)), MAX_NAMED))
