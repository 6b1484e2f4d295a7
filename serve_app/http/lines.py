"""Who waits in a proxy: a line for each flow, in which whoever was told to come now has most of the turns."""

from __future__ import annotations

from collections.abc import KeysView
from dataclasses import dataclass, field

from serve_app.http.visits import Visit

TURNS = 4
"""One of so many is of those who came untold, where both wait. Were it none they would wait for ever where more were
told to come than can be served, as the pace has fallen since."""


@dataclass(slots=True)
class Line:
    """Of one flow. num_turns: that those who are due had since one of the others had one"""

    due: dict[Visit, None] = field(default_factory=dict)
    others: dict[Visit, None] = field(default_factory=dict)
    num_turns: int = 0

    def __len__(self) -> int:
        return len(self.due) + len(self.others)

    def next(self) -> Visit:
        """Whose turn it is."""
        is_of_others = self.others and (not self.due or self.num_turns >= TURNS - 1)
        return next(iter(self.others if is_of_others else self.due))

    def note_turn(self, visit: Visit) -> None:
        """It had its turn."""
        self.num_turns = self.num_turns + 1 if visit in self.due and self.others else 0

    def remove(self, visit: Visit) -> None:
        """It waits no more."""
        del (self.due if visit in self.due else self.others)[visit]


class Lines:
    """Flows in the order of their turns: the one whose turn was last is last."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def flows(self) -> KeysView[str]:
        """Of which somebody waits."""
        return self._lines.keys()

    def num_of(self, flow: str, *, is_due: bool = False) -> int:
        """How many of it wait. is_due: of those alone who were told to come"""
        line = self._lines.get(flow)
        return 0 if line is None else len(line.due if is_due else line)

    def add(self, visit: Visit) -> None:
        line = self._lines.setdefault(visit.flow, Line())
        (line.due if visit.is_due else line.others)[visit] = None
        self._num_waiting += 1

    def take(self, flow: str) -> Visit:
        """Whose turn it is of a flow of which somebody waits. The others of it come behind other flows."""
        line = self._lines[flow]
        visit = line.next()
        line.note_turn(visit)
        self.remove(visit)
        return visit

    def remove(self, visit: Visit) -> None:
        """It waits no more. The others of its flow have their next turn behind those of other flows."""
        line = self._lines.pop(visit.flow)
        line.remove(visit)
        self._num_waiting -= 1
        if line:
            self._lines[visit.flow] = line
