"""Turns the tokens of one sequence into text, one token at a time and only in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from serve_app.text.pieces import Pieces

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of a completion as it grows.

    A character whose bytes are spread over several tokens is held back until it is whole, three bytes at
    most, and never shown where the text ends before. Bytes that can no longer become a character are given
    as U+FFFD. The cost of a token depends on that token alone.

    is_at_start: nothing visible came before. Only then does a tokenizer that marks words by a leading
                 space drop the space of the first word, so that the texts of prompt and completion join
                 to the text of both.
    shows_special: special tokens are shown by their names
    """

    def __init__(self, pieces: Pieces, *, is_at_start: bool, shows_special: bool = False) -> None:
        self._pieces = pieces
        self._shows_special = shows_special
        self._is_at_start = is_at_start
        self._utf8 = _UTF8("replace")
        self._num_chars = 0

    @property
    def num_chars(self) -> int:
        """Characters released so far."""
        return self._num_chars

    def feed(self, token_id: int) -> str:
        """Take one token and return the characters that are whole with it; special tokens have none."""
        piece = self._pieces.middle(token_id)
        if piece is None:
            return self._special(token_id) if self._shows_special else ""
        if self._is_at_start:
            piece = self._pieces.first(token_id)
            self._is_at_start = False
        return self._release(self._utf8.decode(piece))

    def _special(self, token_id: int) -> str:
        name = self._pieces.name(token_id)
        return self._release(self._utf8.decode(name.encode())) if name is not None else ""

    def _release(self, text: str) -> str:
        self._num_chars += len(text)
        return text


def join(pieces: Pieces, token_ids: Iterable[int]) -> str:
    """Decode a whole text at once; as `Detokenizer`, but an incomplete last character is given as U+FFFD."""
    found: list[bytes] = []
    for token_id in token_ids:
        piece = pieces.middle(token_id)
        if piece is not None:
            found.append(piece if found else pieces.first(token_id))
    return b"".join(found).decode("utf-8", "replace")
