"""Which tokens would complete a text that is not to be generated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Items
from collections.abc import Set


class BadWords:
    """Token sequences of which the last token is banned behind the others; what a token costs is the words that could
    end there, not all of them.
    """

    def __init__(self, words: Items[tuple[int, ...]]) -> None:
        self._alone = frozenset(word[0] for word in words if len(word) == 1)
        self._by_before: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._by_before[word[-2]].append(word)

    def completions(self, token_ids: Items[int], *, num_generated: int) -> Set[int]:
        """Tokens that would complete a word which was begun in the last `num_generated` of the tokens."""
        if not num_generated or token_ids[-1] not in self._by_before:
            return self._alone
        return self._alone.union(
            word[-1]
            for word in self._by_before[token_ids[-1]]
            if len(word) - 1 <= num_generated and tuple(token_ids[1 - len(word) :]) == word[:-1]
        )
