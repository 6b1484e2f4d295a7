"""Which sequences are computed next, and how far: everything only catches up, within a budget of tokens."""

from __future__ import annotations

import time

from serve_app.engine.batch import Batch, Span
from serve_app.engine.kv.store import KeyValueStore
from serve_app.engine.lora.slots import Slots
from serve_app.engine.queue import WaitingQueue
from serve_app.engine.sequence import Sequence


class Scheduler:
    """Keeps the running sequences and gives them lanes, blocks and adapter slots.

    The sequence on lane i is `running[i]`. Those admitted earlier go first; where blocks run out, the one admitted
    last is preempted: it loses its lane, keeps its tokens, and is computed anew when there is room.
    """

    def __init__(
        self,
        store: KeyValueStore,
        slots: Slots,
        waiting: WaitingQueue,
        *,
        max_batch_tokens: int,
        max_logit_rows: int,
        uses_prefixes: bool = True,
    ) -> None:
        self.waiting = waiting
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        self._admitted: list[Sequence] = []  # the running ones by age
        self._store = store
        self._slots = slots
        self._max_batch_tokens = max_batch_tokens
        self._max_logit_rows = max_logit_rows
        self._uses_prefixes = uses_prefixes

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting))

    def schedule(self) -> Batch:
        """Plan a step: sequences that miss one token, then those that miss more, then newcomers."""
        budget = self._max_batch_tokens
        rows = self._max_logit_rows
        preempted_before = self.num_preemptions
        planned: dict[int, Span] = {}
        for wants_chunk in (False, True):
            for sequence in list(self._admitted):
                if (sequence.num_missing > 1) != wants_chunk or budget <= 0 or sequence.lane is None:
                    continue
                span = self._span(sequence, budget, rows)
                if span.length and self._make_room(sequence, span.end, planned):
                    planned[id(sequence)] = span
                    budget -= span.length
                    rows -= span.scores
        has_room = self.num_preemptions == preempted_before
        while has_room and budget > 0 and (newcomer := self._admit()) is not None:
            span = self._span(newcomer, budget, rows)
            if span.length and self._store.reserve(self._lane(newcomer), span.end):
                planned[id(newcomer)] = span
                budget -= span.length
                rows -= span.scores
        spans = sorted(planned.values(), key=lambda span: (span.length > 1, span.sequence.lane))
        return Batch(tuple(spans))

    def release(self, sequence: Sequence) -> None:
        """Take back a running sequence's lane and slot; its keys and values are gone."""
        lane = self._lane(sequence)
        last = self.running[-1]
        moved = self._store.close_lane(lane, last_length=last.num_computed)
        self.running.pop()
        if moved is not None:
            self.running[lane] = last
            last.lane = lane
        self._admitted.remove(sequence)
        self._slots.release(sequence.request.model)
        sequence.lane = None
        sequence.slot = -1

    def preempt(self, sequence: Sequence) -> None:
        """Take back what a running sequence holds and queue it again, before all others."""
        self.release(sequence)
        sequence.num_computed = 0
        if not sequence.was_reported:
            sequence.prompt_logprobs.clear()
        self.waiting.push_front(sequence)
        self.num_preemptions += 1

    def place_beside(self, parent: Sequence, child: Sequence, num_tokens: int) -> bool:
        """Start `child` on a lane of its own with the parent's first `num_tokens` positions, if there is room now."""
        if not self._store.has_free_lane or not self._store.can_reserve(num_tokens):
            return False
        self._open(child)
        reserved = self._store.reserve(self._lane(child), num_tokens)
        assert reserved, "room was there a moment ago"
        self._store.fork(self._lane(parent), self._lane(child), num_tokens)
        child.num_computed = num_tokens
        return True

    def clear(self) -> list[Sequence]:
        """Give up everything after a failed step; return the sequences that were running."""
        lost = list(self.running)
        for sequence in lost:
            self._slots.release(sequence.request.model)
            sequence.lane = None
            sequence.slot = -1
        self.running.clear()
        self._admitted.clear()
        self._store.clear()
        return lost

    def check_integrity(self) -> None:
        """Assert that lanes, blocks and pins are conserved."""
        assert [sequence.lane for sequence in self.running] == list(range(len(self.running)))
        assert sorted(map(id, self._admitted)) == sorted(map(id, self.running))
        self._store.check_integrity([sequence.num_computed for sequence in self.running])
        self._slots.check_integrity([sequence.request.model for sequence in self.running])

    def _span(self, sequence: Sequence, budget: int, rows: int) -> Span:
        """As much of the sequence as the budgets allow; length 0 where they allow nothing."""
        length = min(sequence.num_missing, budget)
        start = sequence.num_computed
        scores = 0
        if sequence.scores_prompt:
            length = min(length, max(rows, 0))
            scores = max(0, min(start + length, sequence.prompt_length - 1) - start)
        ends = start + length == sequence.num_tokens
        return Span(sequence, start, length, ends and sequence.max_tokens > 0, scores)

    def _make_room(self, sequence: Sequence, num_tokens: int, planned: dict[int, Span]) -> bool:
        """Reserve room for the sequence, at the cost of those admitted after it if need be."""
        while not self._store.reserve(self._lane(sequence), num_tokens):
            youngest = self._admitted[-1]
            planned.pop(id(youngest), None)
            self.preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _admit(self) -> Sequence | None:
        """Take the first of the queue in, with a lane, a slot for its adapter and what prefixes are known.

        There must be room for all its tokens and a block more for each running sequence: less would only lead
        to its preemption.
        """
        sequence = self.waiting.peek()
        if sequence is None or not self._store.has_free_lane:
            return None
        reserve = len(self.running) * self._store.block_size
        if not self._store.can_reserve(sequence.num_tokens + reserve):
            return None
        if not self._slots.can_acquire(sequence.request.model):
            return None
        self.waiting.pop()
        self._open(sequence)
        if self._uses_prefixes and sequence.request.uses_cache and not sequence.scores_prompt:
            lane = self._lane(sequence)
            sequence.num_computed = self._store.match_prefix(lane, sequence.token_ids, salt=sequence.salt)
            self.num_prefix_hit_tokens += sequence.num_computed
            if not sequence.was_reported:
                sequence.num_cached_tokens = min(sequence.num_computed, sequence.prompt_length)
        return sequence

    def _open(self, sequence: Sequence) -> None:
        sequence.started_at = sequence.started_at or time.monotonic()
        sequence.lane = self._store.open_lane()
        sequence.slot = self._slots.acquire(sequence.request.model)
        self.running.append(sequence)
        self._admitted.append(sequence)

    @staticmethod
    def _lane(sequence: Sequence) -> int:
        assert sequence.lane is not None, f"{sequence} has no lane"
        return sequence.lane
