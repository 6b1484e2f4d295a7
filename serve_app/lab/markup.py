"""HTML of texts and tokens: shaded by surprise, alternatives on hover. Whatever a model wrote is escaped.

No scripts, no classes, no addresses: a trusted notebook, an untrusted one and a web page show the same.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.cli.screen import visible

TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;text-align:left;line-height:1.55;font-family:ui-monospace,monospace"
QUIET = "opacity:.65;font-size:85%;text-align:left"
CELL = "vertical-align:top;text-align:left;padding:.4em .8em;border-top:1px solid rgba(128,128,128,.4);max-width:26em"
ALIKE = "background:rgba(128,128,128,.2)"
SURPRISE = "214,96,40"
FULL_SURPRISE = 5.0
"""Nats at which the shade is full: one chance in 150."""


def escaped(text: str) -> str:
    """Safe in content and in quotes."""
    return html.escape(visible(text), quote=True)


def shaded(tokens: Iterable[Token]) -> str:
    """Tokens on a ground that is the stronger the less likely each was."""
    return "".join(
        f'<span style="background:rgba({SURPRISE},{_shade(token):.2f})" title="{_hover(token)}">'
        f"{escaped(token.text)}</span>"
        for token in tokens
    )


def block(prompt: str, inner: str, note: str = "") -> str:
    """A text behind its quiet prompt. `inner` is HTML; the others are not."""
    said = quiet(note) if note else ""
    return f'{said}<div style="{TEXT}"><span style="opacity:.65">{escaped(prompt)}</span>{inner}</div>'


def column(blocks: Iterable[str], foot: str) -> str:
    """One below the other; all are HTML."""
    rows = "".join(f'<div style="margin:.5em 0">{each}</div>' for each in blocks)
    return f"<div>{rows}{foot}</div>"


def quiet(text: str) -> str:
    """A line that says something about others."""
    return f'<div style="{QUIET}">{escaped(text)}</div>'


def side_by_side(heads: Sequence[str], rows: Iterable[str], foot: str) -> str:
    """A table; `rows` and `foot` are HTML."""
    head = "".join(f'<th style="{CELL}">{escaped(each)}</th>' for each in heads)
    return (
        f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>{foot}"
    )


def compared(prompt: str, texts: Iterable[str], num_alike: int) -> str:
    """A row: what all texts have alike at their beginning stands on grey."""
    cells = "".join(
        f'<td style="{CELL};{TEXT}"><span style="{ALIKE}">{escaped(text[:num_alike])}</span>'
        f"{escaped(text[num_alike:])}</td>"
        for text in texts
    )
    return f'<tr><td style="{CELL};{TEXT};opacity:.65">{escaped(prompt)}</td>{cells}</tr>'


def bar(done: int, total: int, note: str) -> str:
    """How far something is."""
    said = escaped(f"{done} of {total} · {note}")
    return f'<div style="{QUIET}"><progress value="{done}" max="{total}"></progress> {said}</div>'


def _shade(token: Token) -> float:
    return 0.0 if token.logprob is None else 0.75 * min(1.0, max(0.0, -token.logprob / FULL_SURPRISE))


def _hover(token: Token) -> str:
    if token.probability is None:
        return ""
    others = sorted(token.alternatives.items(), key=lambda each: -each[1])
    lines = [f"{token.probability:.1%}  {token.text!r}"]
    lines += [f"{math.exp(logprob):.1%}  {text!r}" for text, logprob in others if text != token.text]
    return "&#10;".join(escaped(line) for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token: its text, the natural logarithm of its probability, and those of the likeliest at its place.

    logprob: None where nothing stands before it, as for the first token of an echoed prompt
    offset:  characters of the choice's text before it; None of a chat
    """

    text: str
    logprob: float | None
    alternatives: Mapping[str, float] = field(default_factory=dict)
    offset: int | None = None

    @property
    def probability(self) -> float | None:
        return None if self.logprob is None else math.exp(self.logprob)


def tokens_of(logprobs: Mapping[str, Any] | None) -> tuple[Token, ...]:
    """Read either shape: the four lists of completions, or the entries of chats; none where none were asked for."""
    if not logprobs:
        return ()
    if "tokens" not in logprobs:
        return tuple(_of_entry(entry) for entry in logprobs.get("content") or ())
    texts = logprobs["tokens"]
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    return tuple(
        Token(text=text, logprob=logprob, alternatives=top or {}, offset=offset)
        for text, logprob, top, offset in zip(
            texts, logprobs["token_logprobs"], tops, logprobs["text_offset"], strict=True
        )
    )


def _of_entry(entry: Mapping[str, Any]) -> Token:
    tops = {each["token"]: each["logprob"] for each in entry.get("top_logprobs") or ()}
    return Token(text=entry["token"], logprob=entry["logprob"], alternatives=tops)
