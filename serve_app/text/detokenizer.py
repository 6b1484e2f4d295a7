"""Turns tokens into text: the bytes of each token, and the text of a sequence in whole characters as it grows."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

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
        """Return the bytes that the next token adds; None if it adds nothing and ends no character."""
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


# A token made of one byte, as sentencepiece writes those that its vocabulary has no text for.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Stands before a token to see what the token adds in the middle of a text.
_ANCHOR = "a"


class UnsupportedTokenizer(ValueError):
    """The tokenizer is of a kind whose text cannot be given token by token."""


class Pieces:
    """A table of bytes per token id, built once per tokenizer and never changed. Names stay the tokenizer's: of 152k
    tokens they would be 25 MB more.

    The decoders of language models either map characters to bytes (byte-level) or rewrite each token by
    itself (a word mark becomes a space, `<0x0A>` a byte) and treat only the first of a text differently.
    Both are tables.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.decoder
        steps = steps_of(tokenizer.decoder, "decoders")
        kinds = {step["type"] for step in steps}
        _refuse_unknown(steps)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        num_ids = max(vocabulary.values(), default=-1) + 1
        self._middle = [self._piece_of(token_id, before=(_ANCHOR,)) for token_id in range(num_ids)]

    def middle(self, token_id: int) -> bytes | None:
        """Give what the token adds behind other text; None for special tokens and ids that mean nothing."""
        return self._middle[token_id] if 0 <= token_id < len(self._middle) else None

    def first(self, token_id: int) -> bytes:
        """Give what a visible token adds as the first of a text."""
        piece = self._piece_of(token_id, before=())
        assert piece is not None, f"token {token_id} is not visible"
        return piece

    def name(self, token_id: int) -> str | None:
        """Give the token as the vocabulary spells it; None where there is no such token."""
        return self._tokenizer.id_to_token(token_id) if 0 <= token_id < len(self._middle) else None

    def _piece_of(self, token_id: int, *, before: tuple[str, ...]) -> bytes | None:
        name: str | None = self._tokenizer.id_to_token(token_id)
        if name is None or token_id in self.special_ids:
            return None
        if self._is_byte_level:
            return name.encode("utf-8") if token_id in self._added_ids else _byte_level_piece(name)
        byte = _BYTE_TOKEN.fullmatch(name) if self._has_byte_tokens else None
        if byte is not None and int(byte[1], 16) >= 0x80:
            return bytes([int(byte[1], 16)])  # alone it is no character, and the decoder would not show it
        text = self._decode((*before, name))
        return text[len(self._decode(before)) :].encode("utf-8")

    def _decode(self, names: Sequence[str]) -> str:
        if not names:
            return ""
        return self._decoder.decode(list(names)) if self._decoder is not None else " ".join(names)


def steps_of(part: Any, name: str) -> list[dict[str, Any]]:
    """List the steps of a part of a tokenizer, nested sequences flattened.

    name: the member that holds the parts of a sequence: `decoders`, `normalizers` or `pretokenizers`
    """
    if part is None:
        return []
    steps: list[dict[str, Any]] = [json.loads(part.__getstate__())]
    while any(step["type"] == "Sequence" for step in steps):
        steps = [inner for step in steps for inner in (step[name] if step["type"] == "Sequence" else (step,))]
    return steps


def _refuse_unknown(steps: Sequence[Mapping[str, Any]]) -> None:
    """Refuse decoders whose text for a token depends on more than the token and whether it is the first."""
    is_fused = False
    for step in steps:
        match step["type"]:
            case "Fuse" | "ByteLevel":
                is_fused = True
            case "ByteFallback" | "Metaspace":
                pass
            case "Replace":
                if is_fused and len(step["pattern"].get("String", "")) != 1:
                    raise UnsupportedTokenizer("its decoder replaces text across tokens")
            case "Strip":
                if step["stop"] and is_fused:
                    raise UnsupportedTokenizer("its decoder strips the end of the text")
            case kind:
                raise UnsupportedTokenizer(f"its decoder has a step {kind!r}, which is not supported")
    if any(step["type"] == "ByteLevel" for step in steps) and len(steps) > 1:
        others = sorted({step["type"] for step in steps} - {"ByteLevel", "Fuse"})
        if others:
            raise UnsupportedTokenizer(f"its decoder mixes ByteLevel with {', '.join(others)}")


def _byte_alphabet() -> dict[str, int]:
    """Give the byte that each character of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()


def _byte_level_piece(name: str) -> bytes:
    try:
        return bytes(BYTE_ALPHABET[character] for character in name)
    except KeyError:  # not written in the byte alphabet: the library's decoder takes it as text, too
        return name.encode("utf-8")
