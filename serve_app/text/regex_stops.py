"""Cuts a growing text where a match of one of its regular expressions begins."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.errors import InvalidRequest
from serve_app.text.regex_program import TAIL, UNKNOWN, Accept, Program, Read, State, program_of
from serve_app.text.regex_syntax import BadRegex


def check_regexes(sources: tuple[str, ...], *, param: str = "stop_regex") -> None:
    """Raise InvalidRequest, which names the parameter, where these cannot be matched in one pass."""
    try:
        program_of(sources)
    except BadRegex as error:
        raise InvalidRequest.refusing(param, must=error.must, found=error.found) from None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A match that may be under way: where it began, and the states of the program it may be in."""

    begin: int
    places: tuple[int, ...]


class RegexStopMatcher:
    """Shows a text up to the place where a match begins, and nothing of the match.

    The text ends at the first character at which any match is complete. Of several that are complete there the one
    that began earliest counts, of those that began together the expression named first. Neither depends on how
    the text is split into pieces, but for `$` and `\\Z`: they hold where a piece ends, as in SGLang, which searches the
    end of what was generated after each token. `\\b` waits for the next character, or for the end.

    Held back is what follows the earliest place where a match may have begun that can still become complete, and
    nothing else. An expression whose matches have no greatest length (`<a>.*</a>`) may thus hold back from there to
    the end of the text: that is the price of never showing a part of a match.

    The work for a character is bounded by the size of the program, whatever the text and the expressions: each of
    its states belongs to the earliest attempt that reached it (Pike's simulation), there is no backtracking.

    matched:      the expression that ended the text
    matched_text: what it matched
    """

    def __init__(self, sources: tuple[str, ...]) -> None:
        """Raises BadRegex; `check_regexes` tells a client of it."""
        self._program: Program | None = program_of(sources) if sources else None
        self._attempts: list[Attempt] = []  # the earliest first
        self._held = ""
        self._num_shown = 0
        self._num_read = 0
        self._last: str | None = None  # the character before the place that was reached
        self.matched: str | None = None
        self.matched_text = ""

    def feed(self, text: str, *, is_tail: bool = True) -> str:
        """Take more of the text and return what is now certain to be shown; "" after a match.

        is_tail: this is all that there is of the text by now, so that `$` may hold behind it
        """
        if self.matched is not None:
            return ""
        if self._program is None:
            return text
        self._held += text
        for character in text:
            if (self._attempts or self._program.may_begin(character)) and self._read(self._program, character):
                return self._show_until(self._num_shown + len(self._held))
            self._last = character
            self._num_read += 1
            if self._attempts and self._is_complete(self._program, after=UNKNOWN):
                return self._show_until(self._num_shown + len(self._held))
        if text and is_tail and self._attempts and self._is_complete(self._program, after=TAIL):
            return self._show_until(self._num_shown + len(self._held))
        return self._show_until(self._attempts[0].begin if self._attempts else self._num_read)

    def flush(self) -> str:
        """End the text: return what was held back, up to a match that the end completes."""
        if self.matched is not None or self._program is None:
            return ""
        self._is_complete(self._program, after=None)
        return self._show_until(self._num_shown + len(self._held))

    def _read(self, program: Program, character: str) -> bool:
        """Take a character; True, and it was not taken, where a match is complete in front of it."""
        seen: set[int] = set()
        claimed: set[int] = set()
        attempts = []
        for attempt in (*self._attempts, Attempt(self._num_read, (program.start,))):
            states = program.settle(attempt.places, seen, before=self._last, after=character)
            if self._accept(attempt, states):
                return True
            places = [
                state.to
                for state in states
                if isinstance(state, Read) and state.to not in claimed and state.character.pattern.match(character)
            ]
            if places:
                claimed.update(places)
                attempts.append(Attempt(attempt.begin, tuple(dict.fromkeys(places))))
        self._attempts = attempts
        return False

    def _is_complete(self, program: Program, *, after: str | None) -> bool:
        """Whether a match ends here; `after` is what comes next, as for `Program.settle`."""
        seen: set[int] = set()
        return any(
            self._accept(attempt, program.settle(attempt.places, seen, before=self._last, after=after))
            for attempt in self._attempts
        )

    def _accept(self, attempt: Attempt, states: list[State]) -> bool:
        """End the text where one of these states completes the attempt."""
        complete = [state.number for state in states if isinstance(state, Accept)]
        if not complete:
            return False
        assert self._program is not None
        begin = attempt.begin - self._num_shown
        self.matched = self._program.sources[min(complete)]
        self.matched_text = self._held[begin : self._num_read - self._num_shown]
        self._held = self._held[:begin]
        self._attempts = []
        return True

    def _show_until(self, place: int) -> str:
        num_chars = place - self._num_shown
        shown, self._held = self._held[:num_chars], self._held[num_chars:]
        self._num_shown = place
        return shown
