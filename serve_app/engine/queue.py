"""Sequences that wait to be computed: a line per flow and class, in each first come first served."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

from serve_app.core.shares import Share
from serve_app.engine.fairness.counters import Counters
from serve_app.engine.fairness.turns import Key
from serve_app.engine.sequence import Sequence

MAX_LOOKAHEAD = 128
"""So far into the queue is looked for one that has what it needs; of several lines, so far into all together."""
LEAST_LOOKAHEAD = 2
"""But so far into each, so that nobody's requests hide another one's."""
MOST_LOOKED_AT = 256
"""In one pass, however many lines there are; those beyond have their turns when others had theirs."""


class Line:
    """Those of one flow and class, in the order in which they came; those sent back go to the front.

    since:  when it began to wait, or last had a turn
    number: in which the lines came
    """

    def __init__(self, share: Share, *, since: float, number: int) -> None:
        self.share = share
        self.since = since
        self.number = number
        self.sequences: OrderedDict[int, Sequence] = OrderedDict()


KeyOf = Callable[[Line, Sequence], Key]


class WaitingQueue:
    """In the order in which they came, where there is one line. The service bounds how many may come.

    counters: are told which flows wait, and who had the last turn
    """

    def __init__(self, counters: Counters | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = counters or Counters()
        self._clock = clock
        self._lines: dict[tuple[str, str], Line] = {}
        self._num_lines = 0
        self._num_sequences = 0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        """Line by line."""
        return (sequence for line in self._lines.values() for sequence in line.sequences.values())

    @property
    def has_several_lines(self) -> bool:
        return len(self._lines) > 1

    def push(self, sequence: Sequence) -> None:
        """Put it behind those of its line."""
        self._line_for(sequence).sequences[id(sequence)] = sequence
        self._num_sequences += 1

    def push_front(self, sequence: Sequence) -> None:
        """Put back a sequence that had its turn already."""
        self.push(sequence)
        self._line_for(sequence).sequences.move_to_end(id(sequence), last=False)

    def take(self, sequence: Sequence) -> None:
        """Take out one that is in it, wherever it stands."""
        line = self._lines[_name(sequence)]
        del line.sequences[id(sequence)]
        self._num_sequences -= 1
        if not line.sequences:
            del self._lines[_name(sequence)]
            self.counters.leave(line.share.flow)

    def note_turn(self, sequence: Sequence) -> None:
        """Its line has its turn, with this one; to be called before it is taken out."""
        self._lines[_name(sequence)].since = self._clock()
        self.counters.begin_turn(sequence.request.share.flow)

    def remove(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out and return every sequence that `is_wanted` names."""
        removed = [sequence for sequence in self if is_wanted(sequence)]
        for sequence in removed:
            self.take(sequence)
        return removed

    def in_turn(self, key_of: KeyOf) -> Iterator[Sequence]:
        """Those to be looked at, one by one: whoever's line has the least key, for as long as it has it.

        key_of: of a line and its next sequence; asked again where something has changed since

        O(lines), and O(log lines) for each sequence that is looked at.
        """
        lines = list(self._lines.values())
        if len(lines) == 1:
            return iter(list(islice(lines[0].sequences.values(), MAX_LOOKAHEAD)))
        return islice(self._merged(lines, key_of), MOST_LOOKED_AT)

    def _merged(self, lines: list[Line], key_of: KeyOf) -> Iterator[Sequence]:
        most = max(LEAST_LOOKAHEAD, MAX_LOOKAHEAD // max(1, len(lines)))
        seen = self.counters.num_changes
        heap = [(key_of(line, next(iter(line.sequences.values()))), at, seen) for at, line in enumerate(lines)]
        heapify(heap)
        ahead: dict[int, list[Sequence]] = {}
        while heap:
            key, at, seen = heappop(heap)
            line = lines[at]
            if at not in ahead:
                ahead[at] = list(islice(line.sequences.values(), most))[::-1]
            left = ahead[at]
            if seen != self.counters.num_changes:
                now, seen = key_of(line, left[-1]), self.counters.num_changes
                if now > key and heap and now > heap[0][0]:
                    heappush(heap, (now, at, seen))  # another line of its flow had a turn meanwhile
                    continue
                key = now
            looked_at = left.pop()
            yield looked_at
            if left:
                if seen != self.counters.num_changes or left[-1].request.model != looked_at.request.model:
                    key, seen = key_of(line, left[-1]), self.counters.num_changes
                heappush(heap, (key, at, seen))

    def _line_for(self, sequence: Sequence) -> Line:
        name = _name(sequence)
        line = self._lines.get(name)
        if line is None:
            self._num_lines += 1
            share = sequence.request.share
            line = self._lines[name] = Line(share, since=self._clock(), number=self._num_lines)
            self.counters.enter(share.flow)
        return line


def _name(sequence: Sequence) -> tuple[str, str]:
    share = sequence.request.share
    return share.flow, share.priority
