"""The queue of waiting sequences: one line for each group that the policy tells apart, first come, first served."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice, takewhile

from serve_app.core.shares import Share
from serve_app.engine.scheduler.policy import RANKS, FairShares, Key
from serve_app.engine.scheduler.sequence import Sequence

MAX_LOOKAHEAD = 128
"""Sequences that a pass looks at for one that has what it needs; of several lines, all together."""
LEAST_LOOKAHEAD = 2
"""But so many of each line, so that nobody's requests hide another one's."""
MOST_LOOKED_AT = 256
"""In one pass, however many lines there are; those beyond have their turns when others had theirs."""
MOST_PASSED_OVER = 2048
"""In one pass, without being looked at, as what they lack is known."""


@dataclass(eq=False, slots=True)
class Line:
    """Sequences in the order in which they came; those sent back go to the front.

    since:  when it began to wait, or last had a turn
    number: in which the lines came
    """

    share: Share
    since: float
    number: int
    sequences: OrderedDict[int, Sequence] = field(default_factory=OrderedDict)

    @property
    def first(self) -> Sequence:
        return next(iter(self.sequences.values()))


KeyOf = Callable[[Line, Sequence], Key]
"""Return the key of a line and of its next sequence."""
Lacks = Callable[[Sequence], bool]


class WaitingQueue:
    """Lines by the policy's names. The service bounds how many sequences may wait."""

    def __init__(self, policy: FairShares, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._lines: dict[Hashable, Line] = {}
        self._num_lines = self._num_sequences = 0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate line by line."""
        return (sequence for line in self._lines.values() for sequence in line.sequences.values())

    def push(self, sequence: Sequence) -> None:
        """Put a sequence behind those of its line."""
        self._line_for(sequence).sequences[id(sequence)] = sequence
        self._num_sequences += 1

    def push_front(self, sequence: Sequence) -> None:
        """Put back a sequence that had its turn already."""
        self.push(sequence)
        self._line_for(sequence).sequences.move_to_end(id(sequence), last=False)

    def take(self, sequence: Sequence) -> None:
        """Take out a sequence, wherever it stands."""
        line = self._line_for(sequence)
        del line.sequences[id(sequence)]
        self._num_sequences -= 1
        if not line.sequences:
            del self._lines[self._policy.line_of(line.share)]
            self._policy.leave(line.share)

    def take_in_turn(self, sequence: Sequence) -> None:
        """Take out a sequence that begins now: its line has had its turn."""
        self._line_for(sequence).since = self._clock()
        self._policy.begin_turn(sequence.request.share)
        self.take(sequence)

    def remove(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out and return every sequence that `is_wanted` names."""
        removed = [sequence for sequence in self if is_wanted(sequence)]
        for sequence in removed:
            self.take(sequence)
        return removed

    def in_turn(self, key_of: KeyOf, *, lacks: Lacks = lambda sequence: False) -> Iterator[Sequence]:
        """Iterate over the sequences to be looked at: always the first of the line with the least key.

        lacks: whether what a sequence lacks is known without looking at it: it is passed over, and hides nobody

        A pass asks for the key of every line once, and again where its turn is near. It keeps lines in a heap, by keys
        that are never above their present ones: a turn lowers those of its flow alone, an adapter that is loaded any.
        """
        most = max(LEAST_LOOKAHEAD, MAX_LOOKAHEAD // max(1, len(self._lines)))
        ahead, looked_at, num_passed_over = dict[int, deque[Sequence]](), Counter[int](), 0

        def entry(line: Line) -> tuple[Key, int, Line]:
            own = ahead.get(line.number)
            return key_of(line, line.first if own is None else own[0]), line.number, line

        def entries(lines: Iterable[Line]) -> list[tuple[Key, int, Line]]:
            return [entry(line) for line in lines if ahead.get(line.number, line.sequences)]

        heap = [(key_of(line, line.first), line.number, line) for line in self._lines.values()]
        heapify(heap)
        num_swaps, num_looks = self._policy.num_swaps, 0
        while heap and num_looks < MOST_LOOKED_AT and num_passed_over < MOST_PASSED_OVER:
            _, number, line = heap[0]
            if not ahead.get(number, line.sequences):
                heappop(heap)
                continue
            if (now := entry(line)) != heap[0]:
                heapreplace(heap, now)
                continue
            own = ahead.setdefault(number, deque(islice(line.sequences.values(), MOST_PASSED_OVER)))
            num_looks += 1
            if num_lacking := sum(1 for _ in takewhile(lacks, islice(own, MOST_PASSED_OVER - num_passed_over))):
                num_passed_over += num_lacking
                ahead[number] = deque(islice(own, num_lacking, None))
                continue
            yield (sequence := own.popleft())
            looked_at[number] += 1
            if looked_at[number] == most:
                own.clear()
            if num_swaps != self._policy.num_swaps:
                heap, num_swaps = entries(self._lines.values()), self._policy.num_swaps
                heapify(heap)
            elif id(sequence) not in line.sequences:  # it had its turn
                for each in entries(self._lines_of_flow(line.share)):
                    heappush(heap, each)

    def _lines_of_flow(self, share: Share) -> list[Line]:
        names = {self._policy.line_of(replace(share, priority=priority)) for priority in RANKS}
        return [self._lines[name] for name in names if name in self._lines]

    def _line_for(self, sequence: Sequence) -> Line:
        share = sequence.request.share
        name = self._policy.line_of(share)
        line = self._lines.get(name)
        if line is None:
            self._num_lines += 1
            line = self._lines[name] = Line(share, self._clock(), self._num_lines)
            self._policy.enter(share)
        return line
