"""Sequences that wait to be computed: a line per flow and class, in each first come first served."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import islice, takewhile

from serve_app.core.shares import Share
from serve_app.engine.scheduler.counters import Counters
from serve_app.engine.scheduler.order import Order
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.engine.scheduler.turns import RANKS, DebtOf, Key, next_rise, with_debt

MAX_LOOKAHEAD = 128
"""So far into the queue is looked for one that has what it needs; of several lines, so far into all together."""
LEAST_LOOKAHEAD = 2
"""But so far into each, so that nobody's requests hide another one's."""
MOST_LOOKED_AT = 256
"""In one pass, however many lines there are; those beyond have their turns when others had theirs."""
MOST_PASSED_OVER = 2048
"""In one pass, without being looked at, as what they lack is known."""


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

    @property
    def first(self) -> Sequence:
        return next(iter(self.sequences.values()))


KeyOf = Callable[[Line, Sequence], Key]
Lacks = Callable[[Sequence], bool]


def no_debt(flow: str) -> float:
    return 0.0


def lacks_nothing(sequence: Sequence) -> bool:
    return False


class WaitingQueue:
    """In the order in which they came, where there is one line. The service bounds how many may come.

    counters: are told which flows wait, and who had the last turn
    """

    def __init__(self, counters: Counters | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = counters or Counters()
        self._clock = clock
        self._lines: dict[tuple[str, str], Line] = {}
        self._by_number: dict[int, Line] = {}
        self._order = Order()
        self._looked_at: dict[int, list[Sequence]] = {}
        self._rises: list[tuple[float, int]] = []
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
        line = self._line_for(sequence)
        line.sequences.move_to_end(id(sequence), last=False)
        self._order.touch(line.number)

    def take(self, sequence: Sequence) -> None:
        """Take out one that is in it, wherever it stands."""
        line = self._lines[_name(sequence)]
        del line.sequences[id(sequence)]
        self._num_sequences -= 1
        if line.sequences:
            self._order.touch(line.number)
            return
        del self._lines[_name(sequence)], self._by_number[line.number]
        self._order.remove(line.number)
        self.counters.leave(line.share.flow)

    def note_turn(self, sequence: Sequence) -> None:
        """Its line has its turn, with this one; to be called before it is taken out."""
        flow = sequence.request.share.flow
        self._lines[_name(sequence)].since = self._clock()
        self.counters.begin_turn(flow)
        for priority in RANKS:
            if (line := self._lines.get((flow, priority))) is not None:
                self._order.touch(line.number)

    def note_adapters(self) -> None:
        """Adapters have come or gone, which some of the lines may wait for."""
        for line in self._lines.values():
            if line.first.request.model.adapter is not None:
                self._order.touch(line.number)

    def remove(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out and return every sequence that `is_wanted` names."""
        removed = [sequence for sequence in self if is_wanted(sequence)]
        for sequence in removed:
            self.take(sequence)
        return removed

    def in_turn(
        self, key_of: KeyOf, *, now: float, debt_of: DebtOf = no_debt, lacks: Lacks = lacks_nothing
    ) -> Iterator[Sequence]:
        """Those to be looked at, one by one: whoever's line has the least key, for as long as it has it.

        key_of:  of a line and its next sequence, now
        debt_of: of a flow: what its key is to be raised by
        lacks:   whether what a sequence lacks is known without looking at it: it is passed over, and hides nobody

        Amortised O(log lines) for each sequence that is looked at, and for each line that something was done with.
        """
        self._note_rises(now)
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            waiting = list(islice(line.sequences.values(), MOST_PASSED_OVER))
            return islice((each for each in waiting if not lacks(each)), MAX_LOOKAHEAD)
        return self._merged(key_of, debt_of, lacks)

    def _merged(self, key_of: KeyOf, debt_of: DebtOf, lacks: Lacks) -> Iterator[Sequence]:
        """`asked` are lines whose whole key is known; of all others the order knows what it is not less than."""
        most = max(LEAST_LOOKAHEAD, MAX_LOOKAHEAD // max(1, len(self._lines)))
        ahead, known, asked = self._begin_pass(), dict[int, Key](), list[tuple[Key, int, int]]()
        looked_at, num_passed_over, num_looks = Counter[int](), 0, 0

        def key(number: int) -> Key:
            line = self._by_number[number]
            return key_of(line, ahead[number][-1] if number in ahead else line.first)

        def ask(number: int, without_debt: Key) -> None:
            known[number] = with_debt(without_debt, debt_of(self._by_number[number].share.flow))
            heappush(asked, (known[number], number, self.counters.num_changes))

        while True:
            for number in self._order.take_touched():
                if number not in ahead:
                    self._order.put(number, key(number))
                elif number in known:
                    ask(number, key(number))
            while asked and known.get(asked[0][1]) != asked[0][0]:
                heappop(asked)
            if (found := self._order.pop_below(asked[0][0] if asked else None, key)) is not None:
                ahead[found[0]] = list(islice(self._by_number[found[0]].sequences.values(), MOST_PASSED_OVER))[::-1]
                ask(*found)
                continue
            if not asked or num_looks == MOST_LOOKED_AT or num_passed_over == MOST_PASSED_OVER:
                return
            _, number, seen = heappop(asked)
            if seen == self.counters.num_changes:
                del known[number]
                num_looks += 1
                front = islice(reversed(ahead[number]), MOST_PASSED_OVER - num_passed_over)
                if num_lacking := sum(1 for _ in takewhile(lacks, front)):
                    del ahead[number][-num_lacking:]
                    num_passed_over += num_lacking
                else:
                    looked_at[number] += 1
                    yield ahead[number].pop()
                    if looked_at[number] == most:
                        ahead[number].clear()
            if ahead[number] and number in self._by_number:
                ask(number, key(number))

    def _begin_pass(self) -> dict[int, list[Sequence]]:
        """What is looked at in it, by line: of those the order has to be told again in the next one."""
        for number in self._looked_at.keys() & self._by_number.keys():
            self._order.touch(number)
        self._looked_at = {}
        return self._looked_at

    def _note_rises(self, now: float) -> None:
        while self._rises and self._rises[0][0] <= now:
            _, number = heappop(self._rises)
            if (line := self._by_number.get(number)) is not None:
                self._order.touch(number)
                heappush(self._rises, (next_rise(line.since, self.counters.rules, now=now), number))

    def _line_for(self, sequence: Sequence) -> Line:
        name = _name(sequence)
        line = self._lines.get(name)
        if line is None:
            self._num_lines += 1
            share, now = sequence.request.share, self._clock()
            line = self._lines[name] = Line(share, since=now, number=self._num_lines)
            self._by_number[line.number] = line
            self._order.touch(line.number)
            heappush(self._rises, (next_rise(now, self.counters.rules, now=now), line.number))
            self.counters.enter(share.flow)
        return line


def _name(sequence: Sequence) -> tuple[str, str]:
    share = sequence.request.share
    return share.flow, share.priority
