"""Tells what a model thinks, between <think> and </think>, from what it says, as the text comes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What a piece of text adds to either."""

    reasoning: str = ""
    content: str = ""

    def __add__(self, other: Split) -> Split:
        return Split(reasoning=self.reasoning + other.reasoning, content=self.content + other.content)


class _Place(Enum):
    START = auto()
    THINKING = auto()
    SAYING = auto()


class ReasoningSplitter:
    """White space around either part is left out, and a piece is shown as soon as it cannot be part of a tag.

    is_thinking: whether the prompt ended behind an open <think>
    """

    def __init__(self, *, is_thinking: bool) -> None:
        self._place = _Place.THINKING if is_thinking else _Place.START
        self._held = ""
        self._has_shown = False

    def feed(self, text: str) -> Split:
        """Take more of the text."""
        self._held += text
        shown, before = Split(), None
        while before is not self._place:
            before = self._place
            shown += self._step()
        return shown

    def flush(self) -> Split:
        """End the text: what was held back is what it seems to be."""
        held, self._held = self._held, ""
        return Split(reasoning=held.rstrip()) if self._place is _Place.THINKING else Split(content=held)

    def _step(self) -> Split:
        match self._place:
            case _Place.START:
                return self._start()
            case _Place.THINKING:
                return self._think()
            case _Place.SAYING:
                return self._say()

    def _start(self) -> Split:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._held = begun[len(OPEN) :]
            self._place = _Place.THINKING
        elif not OPEN.startswith(begun):
            self._place, self._has_shown = _Place.SAYING, True
        return Split()

    def _think(self) -> Split:
        if not self._has_shown:
            self._held = self._held.lstrip()
        thought, close, rest = self._held.partition(CLOSE)
        if close:
            self._held, self._place, self._has_shown = rest, _Place.SAYING, False
            return Split(reasoning=thought.rstrip())
        certain = self._held[: len(self._held) - _num_held(self._held)].rstrip()
        self._held = self._held[len(certain) :]
        self._has_shown = self._has_shown or bool(certain)
        return Split(reasoning=certain)

    def _say(self) -> Split:
        said = self._held if self._has_shown else self._held.lstrip()
        self._held = ""
        self._has_shown = self._has_shown or bool(said)
        return Split(content=said)


def is_thinking(text: str) -> bool:
    """Whether a text ends behind a <think> that nothing closes."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


def _num_held(text: str) -> int:
    """How many last characters may be the beginning of the closing tag."""
    return next((size for size in range(min(len(CLOSE) - 1, len(text)), 0, -1) if CLOSE.startswith(text[-size:])), 0)
