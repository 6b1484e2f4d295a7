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
    shown_marks:   otherwise those are whose names are part of one of these
    """

    def __init__(
        self, pieces: Pieces, *, is_at_start: bool, shows_special: bool = False, shown_marks: tuple[str, ...] = ()
    ) -> None:
        self._pieces = pieces
        self._shows_special = shows_special
        self._shown_marks = shown_marks
        self._is_at_start = is_at_start
        self._utf8 = _UTF8("replace")
        self._num_chars = 0

    @property
    def num_chars(self) -> int:
        """Characters released so far."""
        return self._num_chars

    def feed(self, token_id: int) -> str:
        """Take one token and return the characters that are whole with it; special tokens have none."""
        piece = self._piece(token_id)
        if piece is None:
            return ""
        self._is_at_start = self._is_at_start and self._pieces.middle(token_id) is None
        text = self._utf8.decode(piece)
        self._num_chars += len(text)
        return text

    def place_of(self, token_id: int) -> int:
        """Say how many characters stand before the token, where it is the next one; nothing is fed.

        A token that goes on with a character stands where that does; one that breaks it stands behind its U+FFFD.
        """
        piece = self._piece(token_id)
        pending, _ = self._utf8.getstate()
        if not pending or not piece:
            return self._num_chars
        ahead = _UTF8("replace")
        text = ahead.decode(pending + piece[:1])
        held, _ = ahead.getstate()
        return self._num_chars + len(text) + bool(held) - 1  # the byte is of the last character that has begun

    def _piece(self, token_id: int) -> bytes | None:
        """What the next token adds; None where it adds nothing and ends no character."""
        piece = self._pieces.middle(token_id)
        if piece is not None:
            return self._pieces.first(token_id) if self._is_at_start else piece
        name = self._pieces.name(token_id) if self._shows_special or self._shown_marks else None
        is_shown = name is not None and (self._shows_special or any(name in mark for mark in self._shown_marks))
        return name.encode() if name is not None and is_shown else None


def join(pieces: Pieces, token_ids: Iterable[int]) -> str:
    """Decode a whole text at once; as `Detokenizer`, but an incomplete last character is given as U+FFFD."""
    found: list[bytes] = []
    for token_id in token_ids:
        piece = pieces.middle(token_id)
        if piece is not None:
            found.append(piece if found else pieces.first(token_id))
    return b"".join(found).decode("utf-8", "replace")
