"""Follows one text along its constraint, and says which tokens may come next."""

from __future__ import annotations

import os
from collections.abc import Sequence

from llguidance import LLExecutor, LLMatcher

MAX_THREADS = 4


class Matcher:
    """The state of one text. One thread at a time; other threads run while masks are computed.

    num_words: of 32 bits that a mask takes
    formats:   that its schema asks for and nobody enforces
    """

    def __init__(self, matcher: LLMatcher, *, num_words: int, formats: tuple[str, ...] = ()) -> None:
        self._matcher = matcher
        self.num_words = num_words
        self.formats = formats

    def advance(self, token_id: int) -> None:
        """Take the next token, which the last mask allowed; another one is a failure."""
        self._matcher.consume_token(token_id)

    def go_back(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        self._matcher.rollback(num_tokens)

    @property
    def forced(self) -> int | None:
        """The only token that the next mask will allow, where the constraint says so by itself."""
        tokens = self._matcher.compute_ff_tokens()
        return tokens[0] if tokens else None

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the text so far satisfies the constraint."""
        return self._matcher.is_accepting()

    @property
    def failure(self) -> str | None:
        """Why nothing can be said any more: the work for one token has passed its bounds. It stays so."""
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
