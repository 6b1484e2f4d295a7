"""Cuts a rendered text into tokens, where strangers wrote parts of it and may make no special token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence

from tokenizers import Encoding

Span = tuple[int, int]
MAX_ROUNDS = 4
"""What a cut leaves can be found special anew only where names overlap; what still is after so many is all text."""


def encode_rendered(
    text: str,
    foreign: Sequence[int],
    *,
    encode: Callable[[list[str]], Sequence[Encoding]],
    encode_literally: Callable[[list[str]], Sequence[Encoding]],
    special_ids: Container[int],
) -> tuple[int, ...]:
    """Give the text's tokens, none of them special that reaches over a foreign character.

    foreign: places in the text, in rising order
    encode:  with places of tokens;  encode_literally: in which names of special tokens are text

    The library itself says what it takes for special. Where that reaches over a foreign character, the name is cut
    out and is a text of its own. A text without such names has the tokens that `encode` gives it.
    """
    found: dict[Span, Sequence[int]] = {}
    literal: list[Span] = []
    open_spans: list[Span] = [(0, len(text))]
    for _ in range(MAX_ROUNDS):
        encodings = encode([text[start:end] for start, end in open_spans])
        spans, open_spans = open_spans, []
        for span, encoding in zip(spans, encodings, strict=True):
            strays = list(_strays(encoding, span[0], foreign, special_ids))
            if not strays:
                found[span] = encoding.ids
                continue
            literal += strays
            open_spans += _between(span, strays)
        if not open_spans:
            break
    literal += open_spans
    encodings = encode_literally([text[start:end] for start, end in literal])
    found |= {span: encoding.ids for span, encoding in zip(literal, encodings, strict=True)}
    return tuple(token_id for span in sorted(found) for token_id in found[span])


def _strays(encoding: Encoding, start: int, foreign: Sequence[int], special_ids: Container[int]) -> Iterator[Span]:
    """Where special tokens stand that reach over a foreign character, in places of the whole text."""
    for token_id, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
        if token_id in special_ids and first < last:
            at = bisect_left(foreign, start + first)
            if at < len(foreign) and foreign[at] < start + last:
                yield start + first, start + last


def _between(span: Span, strays: Sequence[Span]) -> Iterator[Span]:
    """What is left of a span, without what is empty."""
    start = span[0]
    for first, last in (*strays, (span[1], span[1])):
        if start < first:
            yield start, first
        start = last
