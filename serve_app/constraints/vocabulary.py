"""A model's tokens as the constraint library knows them: bytes, ids that end a text, and how text is cut into them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from llguidance import LLTokenizer

logger = logging.getLogger(__name__)

SPECIAL_MARK = b"\xff"
"""Begins what the library takes for special tokens; no text in UTF-8 has this byte."""

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Every id of the model's logits.

    pieces: the bytes that each token adds to a text; None where it adds none: special tokens, and padding
    eos_token_ids: those that end a text; a text without any ends where its grammar does
    definition: the tokenizer as its library writes it; "" where that is not known
    special: names of special tokens and their ids; grammars that were written here may name them
    """

    pieces: tuple[bytes | None, ...]
    eos_token_ids: tuple[int, ...] = ()
    definition: str = ""
    special: tuple[tuple[str, int], ...] = ()

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def num_ids(self) -> int:
        """With the one behind the last token, where that stands for the end."""
        return len(self.pieces) + (not self.eos_token_ids)

    @property
    def num_words(self) -> int:
        """Words of 32 bits that a mask takes."""
        return (self.num_ids + 31) // 32

    def tokenizer(self, encode: Encode | None = None) -> LLTokenizer:
        """The library's own; takes some milliseconds per ten thousand tokens.

        Where the library reads the definition as we do, it cuts forced text into tokens by itself. Otherwise `encode`
        does, or without it the longest piece that fits comes first.
        """
        num_ids = self.num_ids
        eos_token_ids = list(self.eos_token_ids) or [len(self.pieces)]
        if self.definition and (own := self._as_defined(num_ids, eos_token_ids)) is not None:
            return own
        source = _Source(self._words(num_ids), self._special(num_ids), eos_token_ids[0], encode)
        source.tokenizer = LLTokenizer(source, eos_token=eos_token_ids)  # type: ignore[arg-type]
        return source.tokenizer

    def _as_defined(self, num_ids: int, eos_token_ids: list[int]) -> LLTokenizer | None:
        """None where it is not read as we read it; let go before another is built, as each takes 50 MB of 152k."""
        try:
            own = LLTokenizer(self.definition, n_vocab=num_ids, eos_token=eos_token_ids)
        except Exception:  # of a kind that the library does not read; it says so in many ways
            logger.info("the tokenizer is not one that llguidance reads by itself", exc_info=True)
            return None
        return own if own.vocab_size == num_ids and self._is_read_alike(own) else None

    def _words(self, num_ids: int) -> list[bytes]:
        named = [piece or f"<id:{token_id}>".encode() for token_id, piece in enumerate(self.pieces)]
        return named + [b"<end of text>"] * (num_ids - len(named))

    def _special(self, num_ids: int) -> list[int]:
        return [token_id for token_id in range(num_ids) if token_id >= len(self.pieces) or not self.pieces[token_id]]

    def _is_read_alike(self, tokenizer: LLTokenizer) -> bool:
        """Whether every token that may be part of a text has the same bytes, and no other may be."""
        return all(
            tokenizer.is_special_token(token_id) or not tokenizer.decode_bytes([token_id])
            if not piece or piece.startswith(SPECIAL_MARK)
            else tokenizer.decode_bytes([token_id]) == piece
            for token_id, piece in enumerate(self.pieces)
        )


class _Source(SimpleNamespace):
    """What the library asks a tokenizer for."""

    tokens: list[bytes]
    encode: Encode | None
    tokenizer: LLTokenizer

    def __init__(self, words: list[bytes], special: list[int], eos_token_id: int, encode: Encode | None) -> None:
        super().__init__(
            tokens=words,
            special_token_ids=special,
            eos_token_id=eos_token_id,
            bos_token_id=None,
            is_tokenizer_wrapper=True,
            encode=encode,
        )

    def __call__(self, text: str) -> Sequence[int]:
        found = self.encode(text) if self.encode is not None else None
        if found is None or max(found, default=0) >= len(self.tokens):
            return self.tokenizer.greedy_tokenize(text)
        return found
