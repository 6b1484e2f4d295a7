"""Which prompts are just being computed, and who does better to wait for one of them than to compute it beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from serve_app.engine.sequence import Sequence

MOST_COMPARED = 256
"""Pairs of prompts in one step; beyond, nobody waits."""


class PromptsInWork:
    """Of one step.

    will_be_found: whether what a sequence computes of its prompt is soon there for others

    A prompt waits for another with which it shares at least half of either, and more than the other has found cached:
    what they share is there when the other is computed, which is earlier than two of them would be, and no later than
    twice what it would take by itself.
    """

    def __init__(
        self, running: Iterable[Sequence], will_be_found: Callable[[Sequence], bool], *, block_size: int
    ) -> None:
        self._will_be_found = will_be_found
        self._block_size = block_size
        self._num_compared = 0
        self._sequences = [each for each in running if will_be_found(each)]

    def add(self, sequence: Sequence) -> None:
        """One that has just begun."""
        if self._will_be_found(sequence):
            self._sequences.append(sequence)

    def compute_for(self, sequence: Sequence) -> bool:
        """Whether the sequence had better wait for one of them."""
        return any(self._shares(each, sequence) for each in self._sequences)

    def _shares(self, other: Sequence, sequence: Sequence) -> bool:
        """Whether so many blocks are the same as make it worth while; a prompt's last token is always computed."""
        size, lengths = self._block_size, (other.prompt_length, sequence.prompt_length)
        num_blocks = max(-(-max(lengths) // (2 * size)), other.num_cached_tokens // size + 1)
        num_tokens = num_blocks * size
        if num_tokens >= min(lengths) or self._num_compared >= MOST_COMPARED or other.salt != sequence.salt:
            return False
        self._num_compared += 1
        return list(other.names[:num_tokens]) == list(sequence.names[:num_tokens])
