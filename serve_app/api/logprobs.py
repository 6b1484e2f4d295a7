"""The legacy `logprobs` object of completions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from serve_app.core.delta import TokenLogprob

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class LegacyLogprobs:
    """Four lists of one length, one entry per token, grown in order."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def extend(self, entries: Iterable[TokenLogprob], *, shift: int = 0) -> None:
        """Add tokens; `shift` is the length of the text that stands before the one their offsets count in."""
        for entry in entries:
            self.tokens.append(entry.text)
            self.token_logprobs.append(None if entry.logprob is None else finite(entry.logprob))
            self.top_logprobs.append(_likeliest(entry))
            self.text_offset.append(entry.offset + shift)

    def append(self, other: LegacyLogprobs) -> None:
        """Add the tokens of another, whose offsets already count in the same text."""
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset

    def body(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def finite(logprob: float) -> float:
    """The log-probability, or the lowest that is written where it is minus infinity or no number."""
    return max(LOWEST_LOGPROB, logprob)


def _likeliest(entry: TokenLogprob) -> dict[str, float] | None:
    """The likeliest tokens and the chosen one by text; of two with one text the likelier stays."""
    if entry.logprob is None:
        return None
    by_text: dict[str, float] = {}
    for top in entry.top:
        by_text.setdefault(top.text, finite(top.logprob))
    by_text.setdefault(entry.text, finite(entry.logprob))
    return by_text
