"""Admission: which of the waiting sequences can begin now. Nobody waits for what another one lacks, nor for ever.

For each sequence, in the order of turns,

1. look for a place. If all are taken, the policy grants a spare one, or names a running sequence that gives its own;
2. skip it while a prompt that is just being computed begins with the same tokens;
3. skip it while it lacks blocks or an adapter's slot. If that lasts for `max_bypass_s`, nobody behind may take those;
4. pin its adapter, and skip it until that is loaded;
5. take it out of the queue, and preempt the sequence that gives its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from serve_app.core.shares import BATCH
from serve_app.engine.kv.store import KeyValueStore
from serve_app.engine.lora.slots import Slots
from serve_app.engine.scheduler.accounting import Account, Accounts
from serve_app.engine.scheduler.policy import FairShares, Key, Rules
from serve_app.engine.scheduler.queue import KeyOf, Line, WaitingQueue
from serve_app.engine.scheduler.sequence import Sequence, num_common

FORESEEN = 16
"""Tokens that each running sequence owes as if they were drawn already, where it may draw so many. Otherwise a flow
that comes with a crowd would have every place before it was charged for any."""
MOST_COMPARED = 256
"""Pairs of prompts that are compared in one step; beyond, nobody waits."""
LEAST_ENDS = 64
"""Tokens behind what is shared, of all that wait for just that; more are computed in one step with the end of who
computes it. As many a step takes beside one sequence that decodes, so that a step more saves one at least."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What one pass over the queue has found.

    keeps_blocks, keeps_slots: whether one that was passed over for long enough waits for some
    lacking: versions of adapters that there is no slot for
    """

    running: Items[Sequence]
    now: float
    keeps_blocks: bool = False
    keeps_slots: bool = False
    lacking: set[str] = field(default_factory=set)


class Shared(NamedTuple):
    """The first tokens of a prompt that are those of one that is just being computed."""

    other: Sequence
    num_tokens: int

    @property
    def is_computed(self) -> bool:
        return self.other.num_computed >= self.num_tokens

    @property
    def is_there(self) -> bool:
        """Whether they are computed by now, and held."""
        return self.is_computed and self.other.place.holding is not None


class Admission:
    """Goes through the queue in the order of turns.

    max_bypass_s: one that was passed over for so long is waited for: from then on nobody behind it takes what it
                  lacks, so that enough of it becomes free
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        policy: FairShares,
        store: KeyValueStore,
        slots: Slots,
        accounts: Accounts,
        *,
        max_bypass_s: float,
        uses_prefixes: bool,
        clock: Callable[[], float],
    ) -> None:
        self._waiting, self._policy, self._accounts = waiting, policy, accounts
        self._store, self._slots = store, slots
        self._max_bypass_s = max_bypass_s
        self._uses_prefixes = uses_prefixes
        self._clock = clock
        self._in_work = PromptsInWork(self._will_be_found, block_size=store.block_size)
        self.failures: list[tuple[Sequence, str]] = []

    def admissible(
        self, running: Items[Sequence], preempt: Callable[[Sequence], None]
    ) -> Iterator[tuple[Sequence, Shared | None]]:
        """Take out of the queue, one by one, what can run now, its adapter pinned, and what it begins with of another.

        The caller gives each its place and blocks before it asks for the next. There must be room for all of a
        sequence's tokens and a block more for each running one: less would only lead to its preemption. Only to the
        first is a place given, if that is all it lacks; the blocks of the sequence that gives it stay cached.

        preempt: takes a running sequence's place
        """
        self._in_work.begin(running if len(self._waiting) else ())
        if not len(self._waiting):
            return
        found, owed, is_first = Findings(running=running, now=self._clock()), self._debts(running), True
        lacks = partial(self._lacks_what_is_known, found=found)
        for sequence in self._waiting.in_turn(self._key_of(owed, found.now), lacks=lacks):
            if found.keeps_blocks:
                return
            giver = None
            if not self._has_place_for(sequence, running, owed):
                giver = self._giver(sequence, running) if is_first else None
                if giver is None:
                    return
            is_first = False
            shared = self._shared_with(sequence)
            is_there = shared is None or shared.is_there
            if not is_there or self._lacks(sequence, found) or not self._has_adapter(sequence):
                if giver is not None:
                    return
                continue
            self._waiting.take_in_turn(sequence)
            if giver is not None:
                self._policy.note_given(giver.request.share.flow)
                owed[giver.request.share.flow] -= self._debt_of(giver)
                preempt(giver)
            yield sequence, shared
            self._in_work.add(sequence)
            owed[sequence.request.share.flow] += self._debt_of(sequence)

    def cuts(self) -> dict[Sequence, int]:
        """Return up to where prompts had better be computed in a step beside which nobody decodes."""
        return self._in_work.cuts()

    def note_found(self, sequence: Sequence, *, is_new: bool) -> None:
        """Note what was cached of a sequence that begins; if it had a place before, what it lost meanwhile."""
        if is_new:
            sequence.place.num_cached_tokens = min(sequence.num_computed, sequence.prompt_length)
        elif sequence.num_missing > self._store.block_size + 1:
            self._policy.note_recomputed(sequence.request.share.flow, sequence.num_missing)

    def _has_place_for(self, sequence: Sequence, running: Items[Sequence], owed: dict[str, float]) -> bool:
        if self._store.has_common_place or not self._store.has_any_place:
            return self._store.has_common_place
        shares = [each.request.share for each in running]
        return self._policy.may_take_spare(shares, owed, sequence.request.share)

    def _giver(self, claimant: Sequence, running: Items[Sequence]) -> Sequence | None:
        """Return the running sequence that gives its place to the claimant, if one does."""
        shares, debts = [each.request.share for each in running], [self._debt_of(each) for each in running]
        resumes = lambda place: self._resumes(running[place])  # noqa: E731
        place = self._policy.giver(shares, debts, claimant.request.share, resumes=resumes)
        return None if place is None else running[place]

    def _lacks_what_is_known(self, sequence: Sequence, found: Findings) -> bool:
        """Return whether it is passed over for what can be told at once, so that it hides nobody behind it."""
        if found.keeps_blocks or not self._store.has_common_place:
            return False
        if self._in_work.holds_up(sequence):
            return True
        if self._lacks(sequence, found):
            return True
        model = sequence.request.model
        return bool(sequence.place.mix) and not self._slots.is_ready(model) and self._slots.failed(model) is None

    def _lacks(self, sequence: Sequence, found: Findings) -> bool:
        return self._lacks_blocks(sequence, found) or self._lacks_slots(sequence, found)

    def _lacks_blocks(self, sequence: Sequence, found: Findings) -> bool:
        if self._store.can_reserve(sequence.num_tokens + len(found.running) * self._store.block_size):
            return False
        found.keeps_blocks |= self._is_overdue(sequence, found.now)
        return True

    def _lacks_slots(self, sequence: Sequence, found: Findings) -> bool:
        """Return whether it lacks a slot. None becomes free during a pass, unless an adapter has failed."""
        model = sequence.request.model
        if model.adapter is None or sequence.place.mix:
            return False
        if not found.keeps_slots and model.version not in found.lacking:
            if self._slots.can_acquire(model):
                return False
            found.lacking.add(model.version)
        found.keeps_slots |= self._is_overdue(sequence, found.now)
        return True

    def _is_overdue(self, sequence: Sequence, now: float) -> bool:
        """Return whether it was passed over for too long. What it waited for its turn before does not count; one that
        was sent back had its turn, and counts from then."""
        place = sequence.place
        if place.passed_over_at is None:
            place.passed_over_at = now if place.started_at is None else place.started_at
        return now - place.passed_over_at > self._max_bypass_s

    def _has_adapter(self, sequence: Sequence) -> bool:
        """Pin its adapter where it has one, and return whether it is loaded. If it cannot be had any more, the sequence
        is taken out of the queue."""
        model, place = sequence.request.model, sequence.place
        if model.adapter is None:
            return True
        if not place.mix:
            if not self._slots.can_acquire(model):
                return False
            num_before = self._slots.num_loads
            place.mix = self._slots.acquire(model)
            if num_swaps := self._slots.num_loads - num_before:
                service = self._policy.charge_swaps(sequence.request.share, num_swaps)
                self._accounts.note(sequence.request.share.flow, Account(service=service, num_swaps=num_swaps))
        reason = self._slots.failed(model)
        if reason is not None:
            self._waiting.take(sequence)
            self._slots.release(model)
            place.mix = ()
            self.failures.append((sequence, reason))
        return reason is None and self._slots.is_ready(model)

    def _resumes(self, sequence: Sequence) -> bool:
        """Return whether it would find what it has computed, but for the last block."""
        may_find = self._uses_prefixes and sequence.may_skip_computed
        return may_find and sequence.is_sound and not sequence.num_held and not sequence.forks

    def _key_of(self, owed: dict[str, float], now: float) -> KeyOf:
        """Return what gives a line's key; in one place with its names at hand, as a pass asks for every line's."""
        policy, slots = self._policy, self._slots

        def key_of(line: Line, first: Sequence) -> Key:
            share, model = line.share, first.request.model
            is_kept = share.flow == policy.holder or (model.adapter is not None and slots.is_ready(model))
            debt = owed.get(share.flow, 0.0)
            return policy.turn_key(share, owed=debt, since=line.since, is_kept=is_kept, number=line.number, now=now)

        return key_of

    def _debts(self, running: Items[Sequence]) -> dict[str, float]:
        """Return by flow what it will be charged for its running sequences, as is foreseen."""
        owed = defaultdict[str, float](float)
        for sequence in running:
            owed[sequence.request.share.flow] += self._debt_of(sequence)
        return owed

    def _debt_of(self, sequence: Sequence) -> float:
        return debt_of(sequence, self._policy.rules, foreseen=FORESEEN)

    def _will_be_found(self, sequence: Sequence) -> bool:
        """Return whether what it computes of its prompt is soon there for others; scored prompts go slowly."""
        is_computing = sequence.place.holding is not None and not sequence.place.is_prompt_published
        return self._uses_prefixes and is_computing and not sequence.scores_prompt and self._is_long(sequence)

    def _shared_with(self, sequence: Sequence) -> Shared | None:
        takes = sequence.may_skip_computed and self._is_long(sequence)
        return self._in_work.shared_with(sequence) if takes else None

    def _is_long(self, sequence: Sequence) -> bool:
        """Return whether there is a block to find; the last token is always computed."""
        return sequence.prompt_length > self._store.block_size


def debt_of(sequence: Sequence, rules: Rules, *, foreseen: int) -> float:
    """Return service divided by the weight: its prompt, if more than the next token is missing, and some tokens.

    foreseen: tokens that it will draw, at most
    """
    missing = sequence.num_missing
    num_drawn = min(foreseen, max(sequence.max_tokens - sequence.num_generated, 0))
    service = rules.decode_weight * num_drawn + rules.prefill_weight * (missing if missing > 1 else 0)
    return service / sequence.request.share.weight


class PromptsInWork:
    """The prompts that are just being computed, and which waiting ones do better to wait for one of them.

    A prompt waits for another with which it shares at least half of either, and more than the other has found cached.
    What they share is there when the other has computed it, which is earlier than two of them would be, and no later
    than twice what it would take by itself. It takes that at once, before the other's logits have shown it sound: the
    two would compute the same, so where it is not, it fails as it would have by itself.

    Kept from step to step, so that no pair of prompts is compared twice while one of them is computed.

    will_be_found: whether what a sequence computes of its prompt is soon there for others
    """

    def __init__(self, will_be_found: Callable[[Sequence], bool], *, block_size: int) -> None:
        self.num_compared = 0
        self._will_be_found = will_be_found
        self._block_size = block_size
        self._compared_before = 0
        self._verdicts: dict[Sequence, dict[Sequence, int]] = {}
        self._awaited: dict[Sequence, Shared] = {}

    def begin(self, running: Iterable[Sequence]) -> None:
        """Begin a step, before which these run."""
        self._compared_before = self.num_compared
        before, self._verdicts = self._verdicts, {}
        for each in running:
            if self._will_be_found(each):
                self._verdicts[each] = before.get(each, {})
        if before.keys() - self._verdicts.keys():
            self._awaited = {each: shared for each, shared in self._awaited.items() if shared.other in self._verdicts}

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that has just begun."""
        self._awaited.pop(sequence, None)
        if self._will_be_found(sequence):
            self._verdicts[sequence] = {}

    def shared_with(self, sequence: Sequence) -> Shared | None:
        """Return what the sequence had better wait for, or begin with where it is there."""
        if sequence in self._awaited:
            return self._awaited[sequence]
        for each, verdicts in self._verdicts.items():
            if sequence not in verdicts:  # no prompt changes while `each` is here
                if self.num_compared - self._compared_before >= MOST_COMPARED:
                    continue
                verdicts[sequence] = self._compare(each, sequence)
            if verdicts[sequence]:
                self._awaited[sequence] = Shared(each, verdicts[sequence])
                return self._awaited[sequence]
        return None

    def holds_up(self, sequence: Sequence) -> bool:
        """Return whether it is known already that it had better wait."""
        shared = self._awaited.get(sequence)
        return shared is not None and not shared.is_there

    def cuts(self) -> dict[Sequence, int]:
        """Return up to where prompts should be computed in a step in which nobody decodes.

        Then the ends of many waiting prompts are computed in one step with theirs.
        """
        ends: dict[Shared, int] = {}
        for sequence, shared in self._awaited.items():
            if not shared.is_computed:
                ends[shared] = ends.get(shared, 0) + sequence.prompt_length - shared.num_tokens
        nearest: dict[Sequence, int] = {}
        for shared, num_tokens in ends.items():
            if num_tokens > LEAST_ENDS:
                nearest[shared.other] = min(shared.num_tokens, nearest.get(shared.other, shared.num_tokens))
        return nearest

    def _compare(self, other: Sequence, sequence: Sequence) -> int:
        """Return how many tokens both begin with, 0 if too few. A prompt's last token is always computed.

        Nobody of a higher class waits for one of the class `batch`, which sits out for others.
        """
        if other.request.share.priority == BATCH != sequence.request.share.priority:
            return 0
        size, lengths = self._block_size, (other.prompt_length, sequence.prompt_length)
        num_blocks = max(-(-max(lengths) // (2 * size)), other.place.num_cached_tokens // size + 1)
        num_tokens = num_blocks * size
        if num_tokens >= min(lengths) or other.salt != sequence.salt:
            return 0
        self.num_compared += 1
        most = min(lengths) - 1
        ours, others = list(sequence.names[:most]), list(other.names[:most])
        return num_common(ours, others) if ours[:num_tokens] == others[:num_tokens] else 0
