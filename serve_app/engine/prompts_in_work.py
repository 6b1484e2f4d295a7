"""Which prompts are just being computed, and who does better to wait for one of them than to compute it beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from serve_app.engine.sequence import Sequence

MOST_COMPARED = 256
"""Pairs of prompts that are compared in one step; beyond, nobody waits."""


class PromptsInWork:
    """Kept from step to step, so that no pair of prompts is compared twice while one of them is computed.

    will_be_found: whether what a sequence computes of its prompt is soon there for others

    A prompt waits for another with which it shares at least half of either, and more than the other has found cached:
    what they share is there when the other is computed, which is earlier than two of them would be, and no later than
    twice what it would take by itself.
    """

    def __init__(self, will_be_found: Callable[[Sequence], bool], *, block_size: int) -> None:
        self.num_compared = 0
        self._will_be_found = will_be_found
        self._block_size = block_size
        self._compared_before = 0
        self._verdicts: dict[Sequence, dict[Sequence, bool]] = {}
        self._awaited: dict[Sequence, Sequence] = {}

    def begin(self, running: Iterable[Sequence]) -> None:
        """A step, before which these run."""
        self._compared_before = self.num_compared
        before, self._verdicts = self._verdicts, {}
        for each in running:
            if self._will_be_found(each):
                self._verdicts[each] = before.get(each, {})
        if before.keys() - self._verdicts.keys():
            self._awaited = {each: other for each, other in self._awaited.items() if other in self._verdicts}

    def add(self, sequence: Sequence) -> None:
        """One that has just begun."""
        if self._will_be_found(sequence):
            self._verdicts[sequence] = {}

    def compute_for(self, sequence: Sequence) -> bool:
        """Whether the sequence had better wait for one of them."""
        if sequence in self._awaited:
            return True
        for each, verdicts in self._verdicts.items():
            if self._shares(each, sequence, verdicts):
                self._awaited[sequence] = each
                return True
        return False

    def is_awaited_by(self, sequence: Sequence) -> bool:
        """Whether it is known already that it had better wait."""
        return sequence in self._awaited

    def _shares(self, other: Sequence, sequence: Sequence, verdicts: dict[Sequence, bool]) -> bool:
        """Whether so many blocks are the same as make it worth while; neither prompt changes while `other` is here."""
        verdict = verdicts.get(sequence)
        if verdict is None:
            if self.num_compared - self._compared_before >= MOST_COMPARED:
                return False
            verdict = verdicts[sequence] = self._compare(other, sequence)
        return verdict

    def _compare(self, other: Sequence, sequence: Sequence) -> bool:
        """A prompt's last token is always computed."""
        size, lengths = self._block_size, (other.prompt_length, sequence.prompt_length)
        num_blocks = max(-(-max(lengths) // (2 * size)), other.num_cached_tokens // size + 1)
        num_tokens = num_blocks * size
        if num_tokens >= min(lengths) or other.salt != sequence.salt:
            return False
        self.num_compared += 1
        return list(other.names[:num_tokens]) == list(sequence.names[:num_tokens])
