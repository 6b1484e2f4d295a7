"""Which requests of clients the work at hand is for, so that lines of the log can name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MAX_NAMED = 32
"""A line names so many requests at most."""
CONCERN: ContextVar[tuple[str, ...]] = ContextVar("concern", default=())
"""The ids that clients know their requests by; none where the work is for nobody in particular."""


@contextmanager
def concerning(client_request_ids: Iterable[str]) -> Iterator[None]:
    """What is done inside, and in threads that inherit its context, is for these requests."""
    token = CONCERN.set(distinct(client_request_ids))
    try:
        yield
    finally:
        CONCERN.reset(token)


def about(client_request_ids: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """As `extra` of a line that is about these requests, written where no context says so."""
    return {"request_ids": distinct(client_request_ids)}


def distinct(client_request_ids: Iterable[str]) -> tuple[str, ...]:
    """Each once, the first ones of many; what has no name is left out."""
    found: dict[str, None] = {}
    for each in client_request_ids:
        if each and len(found) < MAX_NAMED:
            found[each] = None
    return tuple(found)
