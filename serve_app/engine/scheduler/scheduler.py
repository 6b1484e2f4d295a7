"""Which sequences run: those that are taken in, given what they need, made to give way, and let go."""

from __future__ import annotations

import time
from collections.abc import Callable

from serve_app.engine.kv.storage import Holding
from serve_app.engine.kv.store import KeyValueStore
from serve_app.engine.lora.slots import Slots
from serve_app.engine.scheduler.admission import Admission, Shared
from serve_app.engine.scheduler.pace import Pace
from serve_app.engine.scheduler.planner import Planner
from serve_app.engine.scheduler.queue import WaitingQueue
from serve_app.engine.scheduler.sequence import Batch, Sequence
from serve_app.engine.speculation.speculator import Speculator

COPIED_PER_BATCH_TOKEN = 4
"""Positions that may be copied per token that a step may compute: of half a billion weights, a fifth of a step."""
COPIED_BESIDE_NOBODY = 32
"""Likewise where nobody decodes, who would have to wait for it."""
LOOKED_UP_PER_BATCH_TOKEN = 16
"""Likewise, tokens whose names are looked for among the cached blocks before no further sequence is taken in."""


class Scheduler:
    """Keeps the running sequences, and gives them places, blocks and adapter slots.

    Those admitted earlier go first; where blocks run out, the one admitted last is preempted, of several flows that of
    the one furthest above its share: it loses its place, keeps its tokens, and is computed anew, from what is still
    cached, when there is room.

    running: by age
    paused:  taken out until they are resumed; they hold nothing

    Law: where something is computed, no more is copied in a step than so many positions for each token that it may
    compute, or a block, and a piece where something is kept of who has ended; but for what somebody wants who begins.
    Who has not got its prefix yet is in no batch.
    """

    def __init__(
        self,
        store: KeyValueStore,
        slots: Slots,
        waiting: WaitingQueue,
        *,
        max_batch_tokens: int,
        max_logit_rows: int,
        max_forced: int = 0,
        pace: Pace | None = None,
        speculator: Speculator | None = None,
        max_bypass_s: float = 5.0,
        uses_prefixes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waiting = waiting
        self.running: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.pace = pace or Pace(max_stretch=2.0)
        self.num_preemptions = self.num_prefix_hit_tokens = 0
        self._store, self._slots = store, slots
        self._admission = Admission(
            waiting, store, slots, max_bypass_s=max_bypass_s, uses_prefixes=uses_prefixes, clock=clock
        )
        self._planner = Planner(
            waiting.counters, speculator, reserve=self.reserve, max_batch_tokens=max_batch_tokens,
            max_logit_rows=max_logit_rows, max_forced=max_forced, clock=clock,
        )  # fmt: skip
        self._max_batch_tokens = max_batch_tokens
        self._copied_before = 0
        self._max_looked_up = LOOKED_UP_PER_BATCH_TOKEN * max_batch_tokens
        self._uses_prefixes = uses_prefixes
        self._clock = clock

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting))

    @property
    def may_copy(self) -> bool:
        """Whether one more sequence may begin with a copy of what others computed, before the next step."""
        num_copied = self._store.num_copied_tokens - self._copied_before
        return num_copied + self._store.num_pending_tokens < self._max_copied_tokens

    @property
    def _max_copied_tokens(self) -> int:
        decodes = any(each.is_prompt_computed for each in self.running)
        return (COPIED_PER_BATCH_TOKEN if decodes else COPIED_BESIDE_NOBODY) * self._max_batch_tokens

    def schedule(self) -> Batch:
        """Plan a step: sequences that miss a token, or forced ones too, then newcomers, then a share of the prompts."""
        preempted_before = self.num_preemptions
        for sequence in [each for each in self.running if self._planner.is_near(each)]:
            if sequence.holding is not None:
                self._make_room(sequence)
        if self.num_preemptions == preempted_before:
            self._give_place()
            self._admit()
        self._store.fill(self._max_copied_tokens)
        batch = self._planner.batch(self.running, self.pace, cuts=self._admission.cuts())
        if not batch and self._store.fill_first():  # nobody waits for it
            batch = self._planner.batch(self.running, self.pace, cuts={})
        self._copied_before = self._store.num_copied_tokens
        return batch

    def take_failures(self) -> list[tuple[Sequence, str]]:
        """Sequences that never began because their adapter could not be had, with the reason."""
        return self._admission.take_failures()

    def release(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds; what of it is sound stays cached."""
        if sequence.is_sound:
            self.publish(sequence)
        self.let_go(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """Take back what a sequence holds, if anything; where that fails it holds nothing either."""
        if sequence.holding is None:
            return
        self.running.remove(sequence)
        holding, sequence.holding, sequence.mix = sequence.holding, None, ()
        self._slots.release(sequence.request.model)
        self._store.close(holding, at_once=not self.running)  # else somebody's next token would wait

    def publish(self, sequence: Sequence) -> None:
        """Let others find what is computed of the sequence, which is sound."""
        if self._uses_prefixes:
            computed = sequence.names[: sequence.num_computed]
            self._store.publish(_holding(sequence), computed, salt=sequence.salt)
        sequence.is_prompt_published = True

    def place_beside(self, parent: Sequence, child: Sequence, num_tokens: int) -> bool:
        """Start `child` on a place of its own with the parent's first `num_tokens` positions, if there is room now."""
        if not self._store.has_free_place or not self._store.can_reserve(num_tokens):
            return False
        child.mix = self._slots.acquire(child.request.model)
        try:
            self._store.fork(_holding(parent), self._open(child), num_tokens)
        except Exception:
            self.let_go(child)
            raise
        child.num_computed = num_tokens
        return True

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
            sequence.holding, sequence.mix = None, ()
        self._store.clear()
        return lost

    def check_integrity(self) -> None:
        """Assert that places, blocks and pins are conserved."""
        self._store.check_integrity({_holding(each).place: each.num_computed for each in self.running})
        pinned = [each for each in self.waiting if each.mix]
        self._slots.check_integrity([each.request.model for each in (*self.running, *pinned)])

    def _make_room(self, sequence: Sequence) -> None:
        """Reserve room for the sequence's tokens, at the cost of others, or of itself, if need be."""
        while not self._store.reserve(_holding(sequence), sequence.num_tokens):
            shares = [each.request.share for each in self.running]
            victim = self.running[self.waiting.counters.furthest_above(shares)]
            self._preempt(victim)
            if victim is sequence:
                return

    def _give_place(self) -> None:
        """Where all places are taken, have one given to whose turn it is by who is furthest above its share."""
        if (giver := self._admission.giver(self.running)) is not None:
            self._admission.places.note_given(giver.request.share.flow)
            self._preempt(giver)

    def _preempt(self, sequence: Sequence) -> None:
        self._give_up(sequence)
        self.waiting.push_front(sequence)
        self.num_preemptions += 1

    def _give_up(self, sequence: Sequence) -> None:
        """Take a running sequence's place; its tokens stay, but for those that wait for their scores."""
        sequence.give_up_held()
        self.release(sequence)
        sequence.num_computed = 0
        if not sequence.was_reported:
            sequence.prompt_logprobs.clear()

    def _admit(self) -> None:
        """Take in those of the queue that there is room for, with a place, blocks for all their tokens, and a slot."""
        num_looked_up = 0
        for sequence, shared in self._admission.admissible(self.running):
            is_new = sequence.started_at is None
            holding = self._open(sequence)
            if self._uses_prefixes and sequence.request.uses_cache and sequence.may_skip_computed:
                sequence.num_computed = self._begun_with(sequence, shared)
                num_looked_up += sequence.num_tokens if shared is None else 0
                self.num_prefix_hit_tokens += sequence.num_computed
                self._admission.note_found(sequence, is_new=is_new)
            if not self._store.reserve(holding, sequence.num_tokens):
                self._give_up(sequence)  # copies of what others hold took more than was thought
                self.waiting.push_front(sequence)
                return
            if not self.may_copy or num_looked_up >= self._max_looked_up:
                return  # the others come with the next steps; those that run do not wait for so much at once

    def _begun_with(self, sequence: Sequence, shared: Shared | None) -> int:
        """Give it what is computed of it already, by who shares so much with it or in the cache; how many tokens."""
        holding = _holding(sequence)
        if shared is None:
            return self._store.match_prefix(holding, sequence.names, salt=sequence.salt)
        self._store.fork(_holding(shared.other), holding, shared.num_tokens)
        return shared.num_tokens

    def _open(self, sequence: Sequence) -> Holding:
        sequence.started_at = sequence.started_at or self._clock()
        sequence.holding = self._store.open()
        self.running.append(sequence)
        return sequence.holding

    def _withdraw_waiting(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        withdrawn = self.waiting.remove(is_wanted)
        for sequence in withdrawn:
            if sequence.mix:  # pinned while its adapter is brought
                self._slots.release(sequence.request.model)
                sequence.mix = ()
        return withdrawn


def _holding(sequence: Sequence) -> Holding:
    assert sequence.holding is not None, f"{sequence} has no place"
    return sequence.holding


def start_siblings(leader: Sequence, scheduler: Scheduler) -> None:
    """Fork the computed prompt, all but its last token, whose logits each sibling needs for itself.

    As many as may be copied at once; the others follow with the next steps, or queue where there is no room.
    """
    shared = leader.prompt_length - 1
    siblings = leader.siblings
    if leader.record is not None:
        for sibling in siblings:
            sibling.record = leader.record.fork(shared)
    while siblings and scheduler.may_copy and scheduler.place_beside(leader, siblings[0], shared):
        del siblings[0]  # not earlier: where placing fails, it is lost with its leader and its client is told
    if scheduler.may_copy or leader.is_finished:
        while siblings:
            scheduler.waiting.push_front(siblings.pop())
