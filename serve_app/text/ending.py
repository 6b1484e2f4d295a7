"""Decides where a growing text ends: at the first of its stop strings and regular expressions."""

from __future__ import annotations

from serve_app.core.request import StopParams
from serve_app.text.regex_stops import RegexStopMatcher
from serve_app.text.stops import StopMatcher


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
