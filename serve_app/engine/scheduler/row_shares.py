"""Which of the sequences that decode a step computes, where some flows have many more of them than others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from serve_app.engine.scheduler.counters import Counters
from serve_app.engine.scheduler.pace import NONE_BEYOND, Beyond, Pace
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.engine.scheduler.turns import RANKS

ROUNDING = 1e-9


@dataclass(slots=True)
class Line:
    """The rows of one flow: places among those that are near.

    num_level: of them, as many as all have for their weights that do not wait for more, of its class or a higher one
    num_given: of them, are computed in this step
    """

    weight: float
    rank: int
    places: list[int] = field(default_factory=list)
    num_level: int = 0
    num_given: int = 0

    @property
    def height(self) -> float:
        """Of what it is given."""
        return self.num_given / self.weight


class RowShares:
    """Takes turns with the rows that some flows have beyond others'.

    Nobody's rows sit out for who has as many, nor for who waits for more: that one has its turns. What is beyond may
    stretch a step half as far as prompts may (`Pace`); where a row more costs next to nothing, as on a device that
    reads weights far slower than it multiplies them, none sits out.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._turns: dict[str, int] = {}

    def chosen(self, near: Items[Sequence], pace: Pace, *, has_prompts: bool) -> tuple[Items[Sequence], Beyond]:
        """Those that the step computes, in their order, and what of them is beyond what others have.

        near: by age; those that compute the last token of a prompt are all computed
        has_prompts: whether the step could compute parts of prompts, too
        """
        are_several = len({each.request.share.flow for each in near}) > 1
        lines, num_least = _lines(near, self._counters) if are_several else ({}, 0)
        num_beyond = sum(len(line.places) - line.num_level for line in lines.values())
        if not num_beyond:
            self._turns.clear()
            return near, NONE_BEYOND
        num_level = sum(line.num_level for line in lines.values())
        num_allowed = pace.rows(num_level, num_beyond, is_shared=has_prompts)
        if num_allowed >= num_beyond:
            self._turns.clear()
            return near, Beyond(num_beyond, num_least)
        _give(lines, num_allowed)
        out = self._sitting_out(lines)
        return [each for place, each in enumerate(near) if place not in out], Beyond(num_allowed, num_least)

    def _sitting_out(self, lines: Mapping[str, Line]) -> set[int]:
        """Whose turn it is not; each flow's go round."""
        out, turns = set[int](), {}
        for flow, line in lines.items():
            num_rows = len(line.places)
            if line.num_given < num_rows:
                first = self._turns.get(flow, 0) % num_rows
                turns[flow] = first + line.num_given
                out.update(line.places[at % num_rows] for at in range(turns[flow], first + num_rows))
        self._turns = turns
        return out


def _lines(near: Items[Sequence], counters: Counters) -> tuple[dict[str, Line], int]:
    """By flow, and the rows of the one that all others are measured by."""
    lines: dict[str, Line] = {}
    for place, sequence in enumerate(near):
        if sequence.is_prompt_computed:
            share = sequence.request.share
            line = lines.get(share.flow)
            if line is None:
                line = lines[share.flow] = Line(share.weight, RANKS[share.priority])
            line.rank = min(line.rank, RANKS[share.priority])
            line.places.append(place)
    level, num_least = math.inf, 0
    for flow, line in sorted(lines.items(), key=lambda each: (each[1].rank, len(each[1].places) / each[1].weight)):
        height = len(line.places) / line.weight
        if height < level and not counters.waits(flow):
            level, num_least = height, len(line.places)
        line.num_level = len(line.places)
        if level < line.num_level / line.weight:
            line.num_level = max(1, math.ceil(level * line.weight - ROUNDING))
    return lines, num_least


def _give(lines: Mapping[str, Line], num_beyond: int) -> None:
    """Share out so many rows beyond the level: each to the flow that has least for its weight, of those that want."""
    for line in lines.values():
        line.num_given = line.num_level
    wanting = [(line.height, flow) for flow, line in lines.items() if line.num_given < len(line.places)]
    heapify(wanting)
    for _ in range(num_beyond):
        _, flow = heappop(wanting)
        line = lines[flow]
        line.num_given += 1
        if line.num_given < len(line.places):
            heappush(wanting, (line.height, flow))
