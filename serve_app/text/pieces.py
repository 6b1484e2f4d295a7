"""Knows the bytes that each token of a vocabulary adds to a text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

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
        steps = decoder_steps(tokenizer)
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


def decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """List the steps of the tokenizer's decoder, a sequence of steps flattened."""
    if tokenizer.decoder is None:
        return []
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps = [state]
    while any(step["type"] == "Sequence" for step in steps):
        steps = [inner for step in steps for inner in (step["decoders"] if step["type"] == "Sequence" else (step,))]
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


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_piece(name: str) -> bytes:
    try:
        return bytes(_BYTE_ALPHABET[character] for character in name)
    except KeyError:  # not written in the byte alphabet: the library's decoder takes it as text, too
        return name.encode("utf-8")
