"""Cuts a growing text where a match of one of its regular expressions begins."""

from __future__ import annotations

from serve_app.core.errors import InvalidRequest
from serve_app.text.regex_program import TAIL, UNKNOWN, Program, program_of
from serve_app.text.regex_syntax import BadRegex

FREE_STEPS = 256
"""What is held is looked through so far before it has to wait."""


def check_regexes(sources: tuple[str, ...], *, param: str = "stop_regex") -> None:
    """Raise InvalidRequest, which names the parameter, where these cannot be matched in one pass."""
    try:
        program_of(sources)
    except BadRegex as error:
        raise InvalidRequest.refusing(param, must=error.must, found=error.found) from None


class RegexStopMatcher:
    """Shows a text up to the place where a match begins, and nothing of the match.

    The text ends at the first character at which any match is complete. Of several that are complete there the one
    that began earliest counts, of those that began together the expression named first. Neither depends on how
    the text is split into pieces, but for `$` and `\\Z`: they hold where a piece ends, as in SGLang, which searches the
    end of what was generated after each token. `\\b` waits for the next character, or for the end.

    Held back is what follows the earliest place where a match may have begun that can still become complete. To find
    that place takes as many steps as characters are held. For each character that comes two such steps are taken at
    most, so what is held for long may be shown as much later again. An expression whose matches have no greatest length
    (`<a>.*</a>`) may hold back from there to the end of the text: that is the price of never showing a part of a match.

    The work for a character is bounded by the size of the program, whatever the text and the expressions: which
    positions of the expressions the text may have reached is one integer, and what follows it is looked up.

    matched:      the expression that ended the text
    matched_text: what it matched
    """

    def __init__(self, sources: tuple[str, ...]) -> None:
        """Raises BadRegex; `check_regexes` tells a client of it."""
        self._program: Program | None = program_of(sources) if sources else None
        self._reached = 0  # positions of the program behind what was read
        self._held = ""  # read and not shown
        self._before: str | None = None  # the character in front of what is held
        self._last: str | None = None  # the character read last
        self._num_steps = FREE_STEPS  # that may still be spent on looking for the beginning
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
        for number, character in enumerate(text):
            place = self._program.between(self._last, character)
            if self._reached & place.complete:  # what had to see the next character
                return self._end(self._program, text[:number], self._reached & place.complete)
            self._reached = (place.follow.of(self._reached) | place.first) & self._program.reading(character)
            self._last = character
            if self._reached:
                complete = self._reached & self._program.between(character, UNKNOWN).complete
                if complete:
                    return self._end(self._program, text[: number + 1], complete)
        if text and is_tail and self._reached:
            complete = self._reached & self._program.between(self._last, TAIL).complete
            if complete:
                return self._end(self._program, text, complete)
        self._held += text
        self._num_steps += 2 * len(text)
        if not self._reached:
            return self._show(len(self._held))
        if len(self._held) > self._num_steps:
            return ""
        self._num_steps -= len(self._held)
        return self._show(self._beginning(self._program, self._reached)[0])

    def flush(self) -> str:
        """End the text: return what was held back, up to a match that the end completes."""
        if self.matched is not None or self._program is None:
            return ""
        complete = self._reached & self._program.between(self._last, None).complete
        return self._end(self._program, "", complete) if complete else self._show(len(self._held))

    def _end(self, program: Program, text: str, complete: int) -> str:
        """End the text where a match with one of these last positions is complete, behind this much more of it."""
        self._held += text
        begin, first = self._beginning(program, complete)
        number = next(number for number, positions in enumerate(program.of_source) if positions & first)
        self.matched, self.matched_text = program.sources[number], self._held[begin:]
        return self._held[:begin]

    def _beginning(self, program: Program, reached: int) -> tuple[int, int]:
        """Where in what is held the earliest match began that has reached these positions, and with which."""
        begin, first = len(self._held), 0
        for at in range(len(self._held) - 1, -1, -1):
            before = self._held[at - 1] if at else self._before
            place = program.between(before, self._held[at])
            if reached & place.first:
                begin, first = at, reached & place.first
            if not at:
                break
            reached = place.precede.of(reached) & program.reading(self._held[at - 1])
            if not reached:
                break
        return begin, first

    def _show(self, num_chars: int) -> str:
        shown, self._held = self._held[:num_chars], self._held[num_chars:]
        self._before = shown[-1] if shown else self._before
        return shown
