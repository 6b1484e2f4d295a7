"""What a choice tells of the computation: log-probabilities, hidden states and chosen experts."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter

from serve_app.api.sse import Fragment
from serve_app.core.bounded import Count
from serve_app.core.delta import Recording, TokenLogprob, TopLogprob

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class LegacyLogprobs:
    """Four lists of one length, one entry per token, grown in order."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[Count] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(
        self, entries: Iterable[TokenLogprob], *, shift: int = 0, num_top: int | None = None, by_id: bool = False
    ) -> None:
        """Add tokens.

        shift:   length of the text that stands before the one their offsets count in
        num_top: so many of the likeliest; None is all that there are
        by_id:   they are written as numbers
        """
        write: Write = (lambda token: f"token_id:{token.token_id}") if by_id else attrgetter("text")
        for entry in entries:
            self.tokens.append(write(entry))
            self.token_logprobs.append(None if entry.logprob is None else finite(entry.logprob))
            self.top_logprobs.append(_likeliest(entry, write, num_top))
            self.text_offset.append(entry.offset + shift)

    def append(self, other: LegacyLogprobs) -> None:
        """Add the tokens of another, whose offsets already count in the same text."""
        for each in fields(self):
            getattr(self, each.name).extend(getattr(other, each.name))

    def body(self) -> dict[str, object]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


def finite(logprob: float) -> float:
    """Return the log-probability, or the lowest that JSON holds if it is minus infinity or no number."""
    return max(LOWEST_LOGPROB, logprob)


def ranked_body(entries: Iterable[TokenLogprob], num_top: int) -> list[dict[str, object] | None]:
    """Return vLLM's `prompt_logprobs`: its own token and the likeliest by id at each position; null at the first."""
    return [None if entry.logprob is None else _ranked(entry, entry.logprob, num_top) for entry in entries]


def _ranked(entry: TokenLogprob, logprob: float, num_top: int) -> dict[str, object]:
    by_id = {str(entry.token_id): _ranked_token(logprob, entry.rank, entry.text)}
    for rank, top in enumerate(entry.top[:num_top], start=1):
        by_id.setdefault(str(top.token_id), _ranked_token(top.logprob, rank, top.text))
    return by_id


def _ranked_token(logprob: float, rank: int | None, text: str) -> object:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}


Write = Callable[[TokenLogprob | TopLogprob], str]


def _likeliest(entry: TokenLogprob, write: Write, num_top: int | None) -> dict[str, float] | None:
    """Return the likeliest tokens and the chosen one. Of two that are written alike, the likelier stays."""
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for top in entry.top[:num_top]:
        found.setdefault(write(top), finite(top.logprob))
    found.setdefault(write(entry), finite(entry.logprob))
    return found


DIGITS = "%.9g"
"""So many tell every float32 apart from every other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRecording:
    """is_flat: of one state, which is a list of numbers; otherwise a list of such lists"""

    recording: Recording
    is_flat: bool = False

    def members(self) -> dict[str, object]:
        """Return a choice's members. A million numbers take a quarter of a second, so call this off the event loop."""
        found = self.recording
        members: dict[str, object] = {}
        if found.num_states:
            rows = state_rows(found)
            members["hidden_states"] = Fragment(rows[0] if self.is_flat else f"[{','.join(rows)}]")
        if found.experts:
            members["sglext"] = {
                "routed_experts": experts_text(found),
                "routed_experts_shape": list(found.experts_shape),
            }
        return members


def state_rows(recording: Recording) -> list[str]:
    """Return each state as a JSON list of numbers."""
    data = recording.hidden_states
    size = len(data) // recording.num_states
    return [numbers_text(data[first : first + size]) for first in range(0, len(data), size)]


def numbers_text(data: bytes) -> str:
    """Return float32 as a JSON list; each number reads back as the same float32."""
    numbers = array("f")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return f"[{','.join([DIGITS] * len(numbers))}]" % tuple(numbers)


def experts_text(recording: Recording) -> str:
    """Return base64 of the array."""
    return base64.b64encode(recording.experts).decode("ascii")
