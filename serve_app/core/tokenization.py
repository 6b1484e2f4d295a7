"""Text in tokens outside of completions: what is asked for, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A text to be cut into tokens.

    adds_special:   with the tokens that the tokenizer puts in front of a prompt
    parses_special: special tokens written out in the text are such; otherwise they are text
    with_pieces:    also the bytes of each token
    """

    text: str
    adds_special: bool = False
    parses_special: bool = True
    with_pieces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenization:
    """pieces: of each token, where they were asked for; else None"""

    token_ids: tuple[int, ...]
    pieces: tuple[bytes, ...] | None = None
