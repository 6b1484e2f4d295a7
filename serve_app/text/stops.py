"""Ends a growing text at the first of its stop strings and regular expressions."""

from __future__ import annotations

from collections import deque
from functools import lru_cache

from serve_app.core.request import StopParams
from serve_app.text.regex_stops import RegexStopMatcher


class StopMatcher:
    """Shows a text up to the earliest place where a stop string begins, and nothing of the stop.

    The place is the one that a search of the whole text would find, however the text is split into
    pieces: where a stop is complete while another one that began earlier may still become complete, the
    matcher waits for it. Of two stops that begin at the same place the shorter one is reported, which needs
    no waiting; the text is the same.

    Held back is only what may still belong to a stop. The cost of a character does not depend on the length
    of the stops (Knuth, Morris, Pratt 1977).

    matched: the stop that ended the text. Set by `feed`, or by `flush` where a match was complete and waited.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(_Progress(stop) for stop in dict.fromkeys(stops))
        self._held: deque[str] = deque()  # characters taken and not yet shown
        self._num_taken = 0
        self._begin: int | None = None  # where the stop that is complete begins
        self._candidate: str | None = None
        self.matched: str | None = None

    @property
    def holds_back(self) -> bool:
        """Whether something was taken that is not shown yet."""
        return bool(self._held)

    def feed(self, text: str) -> str:
        """Take more of the text and return what is now certain to be shown; "" after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for character in text:
            self._held.append(character)
            self._num_taken += 1
            self._advance(character)
            if self._begin is not None and self._first_open() >= self._begin:
                return self._end()
        first_open = self._first_open()
        return self._show_until(first_open if self._begin is None else min(self._begin, first_open))

    def flush(self) -> str:
        """End the text: return what was held back, up to a stop that is complete."""
        if self.matched is not None:
            return ""
        if self._candidate is not None:
            return self._end()
        return self._show_until(self._num_taken)

    def _advance(self, character: str) -> None:
        # Of two that are complete at the same character, the longer began earlier; what was complete before
        # gives way only to one that began earlier.
        for progress in self._stops:
            if progress.advance(character):
                begin = self._num_taken - len(progress.stop)
                if self._begin is None or begin < self._begin:
                    self._begin, self._candidate = begin, progress.stop

    def _first_open(self) -> int:
        """Return the earliest place where an incomplete stop may have begun."""
        return self._num_taken - max(progress.length for progress in self._stops)

    def _end(self) -> str:
        assert self._begin is not None
        shown = self._show_until(self._begin)
        self._held.clear()
        self.matched = self._candidate
        return shown

    def _show_until(self, place: int) -> str:
        num_shown = self._num_taken - len(self._held)
        return "".join(self._held.popleft() for _ in range(place - num_shown))


class _Progress:
    """How much of one stop the text ends with.

    length: of the longest proper prefix of the stop that is a suffix of the text
    """

    __slots__ = ("_borders", "length", "stop")

    def __init__(self, stop: str) -> None:
        assert stop, "empty stop strings are filtered before"
        self.stop = stop
        self.length = 0
        self._borders = _borders(stop)

    def advance(self, character: str) -> bool:
        """Take a character; say whether the stop is complete with it."""
        length = self.length
        while length and self.stop[length] != character:
            length = self._borders[length]
        if self.stop[length] == character:
            length += 1
        is_complete = length == len(self.stop)
        self.length = self._borders[length] if is_complete else length
        return is_complete


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """Give for each prefix of `stop`, by length, how long a proper prefix of it is its suffix at most.

    Kept for a while, because every sample of a request asks for the same ones.
    """
    borders = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        if stop[length] == character:
            length += 1
        borders.append(length)
    return tuple(borders)


class Ending:
    """Shows a text up to what ends it, and that too where it is asked to.

    Expressions see what the stop strings let through: a match may not reach over a stop string, and one that is
    complete before it wins. `$` holds behind all that was fed so far, where no stop string holds anything of it back.

    matched: the stop string, or the expression, that ended the text
    """

    def __init__(self, stop: StopParams) -> None:
        self._strings = StopMatcher(stop.strings)
        self._patterns = RegexStopMatcher(stop.patterns) if stop.patterns else None
        self._shows_string = stop.shows_string
        self._shows_pattern = stop.shows_pattern
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take more of the text and return what is now certain to be shown; "" after the end."""
        if self.matched is not None:
            return ""
        shown = self._strings.feed(text)
        return self._through_patterns(shown, is_last=self._strings.matched is not None)

    def flush(self) -> str:
        """End the text: return what was held back, up to what ends it."""
        if self.matched is not None:
            return ""
        return self._through_patterns(self._strings.flush(), is_last=True)

    def _through_patterns(self, text: str, *, is_last: bool) -> str:
        if self._patterns is not None:
            is_tail = not self._strings.holds_back
            text = self._patterns.feed(text, is_tail=is_tail) + (self._patterns.flush() if is_last else "")
            if self._patterns.matched is not None:
                self.matched = self._patterns.matched
                return text + (self._patterns.matched_text if self._shows_pattern else "")
        self.matched = self._strings.matched
        return text + (self.matched if self.matched is not None and self._shows_string else "")
