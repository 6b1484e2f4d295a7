"""How often a guess came true, by how long what it goes on from had matched."""

from __future__ import annotations

from collections.abc import Sequence as Items

FIRST_CHANCES = (0.3, 0.3, 0.3, 0.5, 0.7, 0.8)
"""By level, before anything was seen: what prompts of prose and code gave, rounded down."""
FIRST_WEIGHT = 8.0
SHARED_WEIGHT = 4.0
"""How many guesses of its own outweigh what all sequences before a sequence have told."""
MEMORY = 0.9
SHARED_MEMORY = 0.995


def level_of(num_matched: int) -> int:
    """By powers of two: 0, 1, 2 to 3, 4 to 7, 8 to 15, and more."""
    return min(num_matched.bit_length(), len(FIRST_CHANCES) - 1)


class Trust:
    """Counts hits and misses, old ones for less. That of a sequence begins with what that of its engine has learned.

    Every guess counts, computed or not: whether a token was guessed is known once it is drawn. So nothing has to be
    tried to be trusted again, and a text whose guesses miss costs nothing but the looking.
    """

    def __init__(self, shared: Trust | None = None) -> None:
        self._shared = shared
        self._memory = SHARED_MEMORY if shared is None else MEMORY
        self._hits = [0.0] * len(FIRST_CHANCES)
        self._tries = [0.0] * len(FIRST_CHANCES)

    def note(self, level: int, *, is_hit: bool) -> None:
        self._hits[level] = self._hits[level] * self._memory + is_hit
        self._tries[level] = self._tries[level] * self._memory + 1.0
        if self._shared is not None:
            self._shared.note(level, is_hit=is_hit)

    def chance(self, level: int) -> float:
        """That the next token is the guessed one, in (0, 1)."""
        before, weight = self._before(level)
        return (self._hits[level] + before * weight) / (self._tries[level] + weight)

    def chances(self, num_matched: int, count: int) -> Items[float]:
        """That the first 1, 2, … `count` tokens of a guess all come true."""
        found, together = [], 1.0
        for offset in range(count):
            together *= self.chance(level_of(num_matched + offset))
            found.append(together)
        return found

    def _before(self, level: int) -> tuple[float, float]:
        if self._shared is None:
            return FIRST_CHANCES[level], FIRST_WEIGHT
        return self._shared.chance(level), SHARED_WEIGHT
