"""Tokens of a completion with their log-probabilities, as completions and chats tell them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token: its text, the natural logarithm of its probability, and those of the likeliest at its place.

    logprob: None where nothing stands before it, as for the first token of an echoed prompt
    """

    text: str
    logprob: float | None
    alternatives: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def probability(self) -> float | None:
        return None if self.logprob is None else math.exp(self.logprob)


def tokens_of(logprobs: Mapping[str, Any] | None) -> tuple[Token, ...]:
    """Read either shape: the four lists of completions, or the entries of chats; none where none were asked for."""
    if not logprobs:
        return ()
    if "tokens" in logprobs:
        return _of_lists(logprobs)
    return tuple(_of_entry(entry) for entry in logprobs.get("content") or ())


def _of_lists(logprobs: Mapping[str, Any]) -> tuple[Token, ...]:
    texts = logprobs["tokens"]
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    return tuple(
        Token(text=text, logprob=logprob, alternatives=_read_only(top or {}))
        for text, logprob, top in zip(texts, logprobs["token_logprobs"], tops, strict=True)
    )


def _of_entry(entry: Mapping[str, Any]) -> Token:
    tops = {each["token"]: each["logprob"] for each in entry.get("top_logprobs") or ()}
    return Token(text=entry["token"], logprob=entry["logprob"], alternatives=_read_only(tops))


def _read_only(alternatives: Mapping[str, float]) -> Mapping[str, float]:
    return MappingProxyType(dict(alternatives))
