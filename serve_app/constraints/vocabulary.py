"""A model's tokens as the constraint library knows them, and the matcher that follows one text along its constraint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llguidance import LLExecutor, LLMatcher, LLTokenizer

SLICES = (r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}')
"""Tokens that a JSON string may have anywhere, by their lengths: where ten or thirty more characters fit, all of them
are allowed at once, and none is looked at. Each slice is a tree of the whole vocabulary, 13 MB of 152k tokens. The
library would make two more, of white space and of what is longer, which masks are not computed sooner with."""

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Describes every id of the model's logits to the constraint library.

    pieces: the bytes that each token adds to a text; None where it adds none: special tokens, and padding
    eos_token_ids: those that end a text; a text without any ends where its grammar does
    special: names of special tokens and their ids; grammars that were written here may name them
    """

    pieces: tuple[bytes | None, ...]
    eos_token_ids: tuple[int, ...] = ()
    special: tuple[tuple[str, int], ...] = ()

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def num_ids(self) -> int:
        """Count the ids, with the one behind the last token if that stands for the end."""
        return len(self.pieces) + (not self.eos_token_ids)

    @property
    def num_words(self) -> int:
        """Return the words of 32 bits that a mask takes."""
        return (self.num_ids + 31) // 32

    def tokenizer(self, encode: Encode | None = None) -> LLTokenizer:
        """Return the library's own tokenizer; takes some milliseconds per ten thousand tokens, and 50 MB for 152k.

        Forced text is cut into tokens by `encode`; without it the longest piece that fits comes first. The library
        could read a tokenizer's file by itself and do that, no sooner, with a second copy of the tokenizer in memory.
        """
        eos_token_ids = list(self.eos_token_ids) or [len(self.pieces)]
        source = _Source(self._words(), self._special(), eos_token_ids[0], encode, self.num_ids)
        source.tokenizer = LLTokenizer(source, eos_token=eos_token_ids, slices=list(SLICES))  # type: ignore[arg-type]
        source.forget_words()
        return source.tokenizer

    def _words(self) -> list[bytes]:
        named = [piece or f"<id:{token_id}>".encode() for token_id, piece in enumerate(self.pieces)]
        return named + [b"<end of text>"] * (self.num_ids - len(named))

    def _special(self) -> list[int]:
        return [token_id for token_id in range(self.num_ids) if token_id >= len(self) or not self.pieces[token_id]]


@dataclass(eq=False)
class _Source:
    """What the library asks a tokenizer for."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    encode: Encode | None
    num_ids: int
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True
    tokenizer: LLTokenizer = field(init=False)

    def forget_words(self) -> None:
        """Drop the words: the library has copied them, and keeps this object as long as there may be text to cut."""
        self.tokens.clear()
        self.special_token_ids.clear()

    def __call__(self, text: str) -> Sequence[int]:
        found = self.encode(text) if self.encode is not None else None
        if found is None or max(found, default=0) >= self.num_ids:
            return self.tokenizer.greedy_tokenize(text)
        return found


MAX_THREADS = 4


class Matcher:
    """The state of one text. One thread at a time; other threads run while masks are computed.

    num_words: of 32 bits that a mask takes
    formats:   formats in its schema that are not enforced
    """

    def __init__(self, matcher: LLMatcher, *, num_words: int, formats: tuple[str, ...] = ()) -> None:
        self._matcher = matcher
        self.num_words = num_words
        self.formats = formats

    def advance(self, token_id: int) -> None:
        """Take the next token, which the last mask allowed; another one is a failure."""
        self._matcher.consume_token(token_id)

    def go_back(self, num_tokens: int) -> None:
        """Undo the last tokens."""
        self._matcher.rollback(num_tokens)

    @property
    def forced(self) -> int | None:
        """Return the only token that the next mask will allow, if the constraint says so by itself."""
        tokens = self._matcher.compute_ff_tokens()
        return tokens[0] if tokens else None

    @property
    def is_complete(self) -> bool:
        """Return whether nothing may follow but the end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """Return whether the text so far satisfies the constraint."""
        return self._matcher.is_accepting()

    @property
    def failure(self) -> str | None:
        """Return why the text cannot go on: the work for one token has passed its bounds. It stays so."""
        return self._matcher.get_error() if self._matcher.is_error() else None


class Masks:
    """Computes the masks of many texts at once, in threads of its own."""

    def __init__(self) -> None:
        self._executor = LLExecutor(num_threads=min(MAX_THREADS, os.cpu_count() or 1))

    def fill(self, matchers: Sequence[Matcher], address: int) -> None:
        """Write a mask per text to that address, one behind the other; bit i is token i, 1 is allowed.

        All are of one vocabulary. The caller keeps the memory until this returns. Python's lock is released meanwhile.
        """
        num_words = matchers[0].num_words
        numbered = [(each._matcher, row) for row, each in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(numbered, address, num_words * 4, len(numbered))
