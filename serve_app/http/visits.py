"""A request as a turnstile knows it: first on its way, then inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from serve_app.http.presence import take_one

Leave = Callable[["Visit"], None]


class Announced:
    """One of those who are on the way."""

    def __init__(self, announced: Counter[str], flow: str) -> None:
        self._announced = announced
        self._flow = flow
        self._is_here = False

    def arrive(self) -> None:
        """It asks for its place now, or never will."""
        if not self._is_here:
            self._is_here = True
            take_one(self._announced, self._flow)


class Visit:
    """A request, from when it is let in until it leaves, whatever becomes of it."""

    def __init__(self, leave: Leave, begin: Callable[[], None], flow: str, *, is_due: bool, is_extra: bool) -> None:
        """is_due: it was told to come now;  is_extra: all places are taken but for it"""
        self.has_begun = False
        self.is_due = is_due
        self.is_extra = is_extra
        self.flow = flow
        self._leave = leave
        self._begin = begin

    def begin(self) -> None:
        self.has_begun = True
        self._begin()

    def leave(self) -> None:
        self._leave(self)
