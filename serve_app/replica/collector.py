"""Keeps Python's collector of unreachable objects from stopping every thread of a replica for long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def exempt_what_is_loaded() -> None:
    """Never again look whether what exists now has become unreachable; for a process that keeps it until its end.

    Libraries, model and tokenizer are some 400 000 objects. To look through them takes a third of a second, in which no
    thread runs, and is done again whenever a quarter as many new objects have become old.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def resting() -> Iterator[None]:
    """Within it nothing is looked through, in any thread: for loading, which makes much and drops little in circles.

    Libraries, model and tokenizer are looked through a dozen times while they grow, a tenth of the time that importing
    them takes.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
