"""The scheduler: which sequences run. For each step it

1. gives every running sequence blocks for its next token; where none is free, it preempts the policy's victim;
2. if nothing was preempted, admits waiting sequences (`admission.py`), the first on a place that another gives up if
   need be: opens a place, takes what is computed of the prompt already, reserves blocks;
3. plans the batch (`planner.py`).

Behind the step the engine publishes what is computed, starts forks, and releases what has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from serve_app.core.names import ModelRef
from serve_app.engine.kv.storage import Holding
from serve_app.engine.kv.store import KeyValueStore
from serve_app.engine.lora.slots import Slots
from serve_app.engine.scheduler.accounting import Accounts
from serve_app.engine.scheduler.admission import Admission, Shared
from serve_app.engine.scheduler.planner import Pace, Planner
from serve_app.engine.scheduler.policy import FairShares
from serve_app.engine.scheduler.queue import WaitingQueue
from serve_app.engine.scheduler.sequence import Batch, Sequence
from serve_app.engine.speculation.speculator import Speculator

LOOKED_UP_PER_BATCH_TOKEN = 16
"""Per token that a step may compute, tokens whose names are looked for among the cached blocks before no further
sequence is admitted."""


class Scheduler:
    """Keeps the running sequences, and gives them places, blocks and adapter slots.

    A sequence that is preempted loses its place and keeps its tokens. It is computed anew, from what is still cached,
    when there is room.

    running: by age
    paused:  taken out until they are resumed; they hold nothing
    policy:  who is served first
    """

    def __init__(
        self,
        store: KeyValueStore,
        slots: Slots,
        *,
        policy: FairShares,
        accounts: Accounts,
        waiting: WaitingQueue,
        max_batch_tokens: int,
        max_logit_rows: int,
        max_forced: int = 0,
        pace: Pace | None = None,
        speculator: Speculator | None = None,
        max_bypass_s: float = 5.0,
        uses_prefixes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._slots = store, slots
        self._policy, self.waiting = policy, waiting
        self.running: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.pace = pace or Pace(max_stretch=2.0)
        self.num_preemptions = self.num_prefix_hit_tokens = 0
        self._admission = Admission(
            self.waiting, self._policy, store, slots, accounts,
            max_bypass_s=max_bypass_s, uses_prefixes=uses_prefixes, clock=clock,
        )  # fmt: skip
        self._planner = Planner(
            self._policy, speculator, reserve=self.reserve, max_batch_tokens=max_batch_tokens,
            max_logit_rows=max_logit_rows, max_forced=max_forced, clock=clock,
        )  # fmt: skip
        self._max_batch_tokens = max_batch_tokens
        self._uses_prefixes = uses_prefixes
        self._clock = clock

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting))

    def schedule(self) -> Batch:
        """Plan a step."""
        preempted_before = self.num_preemptions
        for sequence in [each for each in self.running if self._planner.is_near(each)]:
            if sequence.place.holding is not None:
                self._make_room(sequence)
        if self.num_preemptions == preempted_before:
            self._admit()
        return self._planner.batch(self.running, self.pace, cuts=self._admission.cuts())

    def take_failures(self) -> list[tuple[Sequence, str]]:
        """Return sequences that never began because their adapter could not be had, with the reason."""
        failures, self._admission.failures = self._admission.failures, []
        return failures

    def release(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds; what of it is sound stays cached."""
        if sequence.is_sound:
            self.publish(sequence)
        self.let_go(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """Take back what a sequence holds, if anything; where that fails it holds nothing either."""
        holding = sequence.place.holding
        if holding is None:
            return
        self.running.remove(sequence)
        sequence.place.holding, sequence.place.mix = None, ()
        self._slots.release(sequence.request.model)
        self._store.close(holding)

    def publish(self, sequence: Sequence) -> None:
        """Let others find what is computed of the sequence, which is sound."""
        if self._uses_prefixes:
            computed = sequence.names[: sequence.num_computed]
            self._store.publish(_holding(sequence), computed, salt=sequence.salt)
        sequence.place.is_prompt_published = True

    def start_forks(self, parent: Sequence) -> None:
        """Start the other completions of a computed prompt with all but its last token, whose logits each needs itself.

        Those that there is no room for queue.
        """
        shared, forks = parent.prompt_length - 1, parent.forks
        if parent.record is not None:
            for fork in forks:
                fork.record = parent.record.fork(shared)
        while forks and self._place_beside(parent, forks[0], shared):
            del forks[0]  # not earlier: where placing fails, it is lost with its parent and its client is told
        while forks:
            self.waiting.push_front(forks.pop())

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for so many tokens of a running sequence; False, and nothing changed, where others would lose."""
        return self._store.reserve(_holding(sequence), num_tokens)

    def pause(self, is_wanted: Callable[[Sequence], bool]) -> None:
        """Take sequences out until they are resumed; they lose their places and keep their tokens."""
        self.paused += self._withdraw_waiting(is_wanted)
        for sequence in [each for each in self.running if is_wanted(each)]:
            self._give_up(sequence)
            self.paused.append(sequence)

    def resume(self, is_wanted: Callable[[Sequence], bool]) -> None:
        """Put paused sequences first in the queue, in their order."""
        resumed = [each for each in self.paused if is_wanted(each)]
        self.paused = [each for each in self.paused if not is_wanted(each)]
        for sequence in reversed(resumed):
            self.waiting.push_front(sequence)

    def withdraw(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Give up sequences for good, wherever they are; return those that were running."""
        self._withdraw_waiting(is_wanted)
        self.paused = [each for each in self.paused if not is_wanted(each)]
        return [each for each in self.running if is_wanted(each)]

    def clear(self) -> list[Sequence]:
        """Give up everything that runs after a failed step; return what ran."""
        lost, self.running = self.running, []
        for sequence in lost:
            self._slots.release(sequence.request.model)
            sequence.place.holding, sequence.place.mix = None, ()
        self._store.clear()
        return lost

    def check_integrity(self, pinned_beside: Iterable[ModelRef] = ()) -> None:
        """Assert that places, blocks and pins are conserved. pinned_beside: for no sequence"""
        self._store.check_integrity({_holding(each).place: each.num_computed for each in self.running})
        pinned = [each for each in self.waiting if each.place.mix]
        self._slots.check_integrity([each.request.model for each in (*self.running, *pinned)] + [*pinned_beside])

    def _make_room(self, sequence: Sequence) -> None:
        """Reserve room for the sequence's tokens, at the cost of others, or of itself, if need be."""
        while not self._store.reserve(_holding(sequence), sequence.num_tokens):
            victim = self.running[self._policy.victim([each.request.share for each in self.running])]
            self._preempt(victim)
            if victim is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        self._give_up(sequence)
        self.waiting.push_front(sequence)
        self.num_preemptions += 1

    def _give_up(self, sequence: Sequence) -> None:
        """Take a running sequence's place; its tokens stay, but for those that wait for their scores."""
        self.release(sequence)
        sequence.go_back()

    def _admit(self) -> None:
        """Give those of the queue that there is room for a place, blocks for all their tokens, and a slot."""
        num_looked_up = 0
        for sequence, shared in self._admission.admissible(self.running, self._preempt):
            is_new = sequence.place.started_at is None
            holding = self._open(sequence)
            if self._uses_prefixes and sequence.may_skip_computed:
                sequence.num_computed = self._begun_with(sequence, shared)
                num_looked_up += sequence.num_tokens if shared is None else 0
                self.num_prefix_hit_tokens += sequence.num_computed
                self._admission.note_found(sequence, is_new=is_new)
            has_room = self._store.reserve(holding, sequence.num_tokens)
            assert has_room, "who lacks blocks is not admitted"
            if num_looked_up >= LOOKED_UP_PER_BATCH_TOKEN * self._max_batch_tokens:
                return  # the others come with the next steps; those that run do not wait for so much at once

    def _begun_with(self, sequence: Sequence, shared: Shared | None) -> int:
        """Give it what is computed of it already, by who shares so much with it or in the cache; how many tokens."""
        holding = _holding(sequence)
        if shared is None:
            return self._store.match_prefix(holding, sequence.names, salt=sequence.salt)
        self._store.fork(_holding(shared.other), holding, shared.num_tokens)
        return shared.num_tokens

    def _place_beside(self, parent: Sequence, child: Sequence, num_tokens: int) -> bool:
        """Start `child` on a place of its own with the parent's first `num_tokens` positions, if there is room now.

        One that goes on from elsewhere has further tokens already.
        """
        if not self._store.has_common_place or not self._store.can_reserve(child.num_tokens):
            return False
        child.place.mix = self._slots.acquire(child.request.model)
        try:
            holding = self._open(child)
            self._store.fork(_holding(parent), holding, num_tokens)
            has_room = self._store.reserve(holding, child.num_tokens)
            assert has_room, "there were enough blocks"
        except Exception:
            self.let_go(child)
            raise
        child.num_computed = num_tokens
        return True

    def _open(self, sequence: Sequence) -> Holding:
        sequence.place.started_at = sequence.place.started_at or self._clock()
        sequence.place.holding = self._store.open()
        self.running.append(sequence)
        return sequence.place.holding

    def _withdraw_waiting(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        withdrawn = self.waiting.remove(is_wanted)
        for sequence in withdrawn:
            if sequence.place.mix:  # pinned while its adapter is loaded
                self._slots.release(sequence.request.model)
                sequence.place.mix = ()
        return withdrawn


def _holding(sequence: Sequence) -> Holding:
    holding = sequence.place.holding
    assert holding is not None, f"{sequence} has no place"
    return holding
