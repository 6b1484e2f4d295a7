"""Which prompts are just being computed, and who does better to wait for one of them than to compute it beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

from serve_app.engine.scheduler.sequence import Sequence

MOST_COMPARED = 256
"""Pairs of prompts that are compared in one step; beyond, nobody waits."""
LEAST_ENDS = 64
"""Tokens behind what is shared, of all that wait for just that; more are computed in one step with the end of who
computes it. As many a step takes beside one sequence that decodes, so that a step more saves one at least."""


class Shared(NamedTuple):
    """So many first tokens of a prompt are those of one that is just being computed."""

    other: Sequence
    num_tokens: int

    @property
    def is_computed(self) -> bool:
        return self.other.num_computed >= self.num_tokens

    @property
    def is_there(self) -> bool:
        """Whether they are computed by now, and where they can be copied from."""
        holding = self.other.holding
        return self.is_computed and holding is not None and not holding.pending


class PromptsInWork:
    """Kept from step to step, so that no pair of prompts is compared twice while one of them is computed.

    will_be_found: whether what a sequence computes of its prompt is soon there for others

    A prompt waits for another with which it shares at least half of either, and more than the other has found cached:
    what they share is there when the other has computed it, which is earlier than two of them would be, and no later
    than twice what it would take by itself. It takes that at once, before the other's logits have shown it sound: the
    two would compute the same, so where it is not, it fails as it would have by itself.
    """

    def __init__(self, will_be_found: Callable[[Sequence], bool], *, block_size: int) -> None:
        self.num_compared = 0
        self._will_be_found = will_be_found
        self._block_size = block_size
        self._compared_before = 0
        self._verdicts: dict[Sequence, dict[Sequence, int]] = {}
        self._awaited: dict[Sequence, Shared] = {}

    def begin(self, running: Iterable[Sequence]) -> None:
        """A step, before which these run."""
        self._compared_before = self.num_compared
        before, self._verdicts = self._verdicts, {}
        for each in running:
            if self._will_be_found(each):
                self._verdicts[each] = before.get(each, {})
        if before.keys() - self._verdicts.keys():
            self._awaited = {each: shared for each, shared in self._awaited.items() if shared.other in self._verdicts}

    def add(self, sequence: Sequence) -> None:
        """One that has just begun."""
        self._awaited.pop(sequence, None)
        if self._will_be_found(sequence):
            self._verdicts[sequence] = {}

    def shared_with(self, sequence: Sequence) -> Shared | None:
        """What the sequence had better wait for, or begin with where it is there."""
        if sequence in self._awaited:
            return self._awaited[sequence]
        for each, verdicts in self._verdicts.items():
            if num_tokens := self._num_shared(each, sequence, verdicts):
                self._awaited[sequence] = Shared(each, num_tokens)
                return self._awaited[sequence]
        return None

    def holds_up(self, sequence: Sequence) -> bool:
        """Whether it is known already that it had better wait."""
        shared = self._awaited.get(sequence)
        return shared is not None and not shared.is_there

    def cuts(self) -> dict[Sequence, int]:
        """Of those that are being computed, up to where they had better be in a step beside which nobody decodes, as
        then the ends of many that wait are computed in one step with theirs."""
        ends: dict[Shared, int] = {}
        for sequence, shared in self._awaited.items():
            if not shared.is_computed:
                ends[shared] = ends.get(shared, 0) + sequence.prompt_length - shared.num_tokens
        nearest: dict[Sequence, int] = {}
        for shared, num_tokens in ends.items():
            if num_tokens > LEAST_ENDS:
                nearest[shared.other] = min(shared.num_tokens, nearest.get(shared.other, shared.num_tokens))
        return nearest

    def _num_shared(self, other: Sequence, sequence: Sequence, verdicts: dict[Sequence, int]) -> int:
        """How many tokens are the same, where that is worth while; neither prompt changes while `other` is here."""
        verdict = verdicts.get(sequence)
        if verdict is None:
            if self.num_compared - self._compared_before >= MOST_COMPARED:
                return 0
            verdict = verdicts[sequence] = self._compare(other, sequence)
        return verdict

    def _compare(self, other: Sequence, sequence: Sequence) -> int:
        """A prompt's last token is always computed."""
        size, lengths = self._block_size, (other.prompt_length, sequence.prompt_length)
        num_blocks = max(-(-max(lengths) // (2 * size)), other.num_cached_tokens // size + 1)
        num_tokens = num_blocks * size
        if num_tokens >= min(lengths) or other.salt != sequence.salt:
            return 0
        self.num_compared += 1
        most = min(lengths) - 1
        ours, others = list(sequence.names[:most]), list(other.names[:most])
        return _num_common(ours, others, num_tokens) if ours[:num_tokens] == others[:num_tokens] else 0


def _num_common(ours: Items[int], others: Items[int], known: int) -> int:
    """How many of the first are the same, where so many are known to be; as long on both sides."""
    most = len(ours)
    while known < most:
        middle = (known + most + 1) // 2
        if ours[known:middle] == others[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known
