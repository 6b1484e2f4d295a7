"""Walks a text that is still growing: content up to a mark that may begin a call, and what stands between calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from serve_app.core.tools import ToolCallDelta
from serve_app.tools.marks import num_held, skip_space
from serve_app.tools.parsed import Gains, Parsed, new_call_id

MAX_HELD_CHARS = 4096
"""Of what stands before and behind the arguments of a call; longer it is content."""


class Parting(ABC):
    """What is the same whatever form calls have; see `ToolCallParser` for what it promises.

    names: of what may be called
    opener: what begins a call; "" is nothing
    """

    def __init__(
        self, opener: str, names: Collection[str], *, new_id: Callable[[], str] = new_call_id, holds_calls: bool = False
    ) -> None:
        self.num_calls = 0
        self.is_whole = False
        self._opener = opener
        self._names = frozenset(names)
        self._new_id = new_id
        self._holds_calls = holds_calls
        self._buffer = ""
        self._is_last = False
        self._phase: Callable[[Gains], bool] = self._outside
        self._opened = ""  # the mark of the call that is being read, which is content where it turns out to be none

    @property
    def has_calls(self) -> bool:
        return self.num_calls > 0

    def feed(self, text: str) -> Parsed:
        """Take more of the text."""
        self._buffer += text
        return self._parsed()

    def flush(self) -> Parsed:
        """The text has ended: what was held back is what it can still be."""
        self._is_last = True
        return self._parsed()

    def _parsed(self) -> Parsed:
        gains = Gains()
        while self._phase(gains):
            pass
        return gains.parsed()

    # Each phase takes from the buffer and returns whether another one is to go on with what is left.

    def _outside(self, gains: Gains) -> bool:
        """Content, up to the next mark."""
        opener = self._opener
        at = self._buffer.find(opener) if opener else -1
        if at >= 0:
            gains.content.append(self._take(at))
            self._open(opener, skipping=len(opener))
            return True
        held = 0 if self._is_last or not opener else num_held(self._buffer, opener)
        gains.content.append(self._take(len(self._buffer) - held))
        return False

    @abstractmethod
    def _open(self, mark: str, *, skipping: int) -> None:
        """A call may begin; `skipping` characters of the buffer are its mark."""

    def _begin(self, gains: Gains, name: str, arguments: str) -> None:
        gains.calls.append(ToolCallDelta(index=self.num_calls, id=self._new_id(), name=name, arguments=arguments))
        self.num_calls += 1
        self.is_whole = False

    def _go_on(self, gains: Gains, arguments: str) -> None:
        """The call that was begun last has more arguments."""
        gains.calls.append(ToolCallDelta(index=self.num_calls - 1, arguments=arguments))

    def _may_grow(self) -> bool:
        """Whether what is held may still become something."""
        return not self._is_last and len(self._buffer) <= MAX_HELD_CHARS

    def _between_calls(self, gains: Gains) -> bool:
        """A call has ended for good."""
        at = skip_space(self._buffer, 0)
        found = self._found(at, (self._opener,))
        return False if found is None else self._after(at, found)

    def _after(self, at: int, found: str) -> bool:
        """White space before the next mark or the end is nobody's; before anything else it is content."""
        if found or (at == len(self._buffer) and self._is_last):
            self._take(at)
        self._phase = self._outside
        return bool(self._buffer)

    def _found(self, at: int, marks: Collection[str]) -> str | None:
        """Which of the marks stands there; "" is none, None is that more has to come."""
        rest = self._buffer[at:]
        for mark in filter(None, marks):
            if rest.startswith(mark):
                return mark
        if self._is_last:
            return ""
        if not rest or any(mark.startswith(rest) for mark in marks):
            return None
        return ""

    def _take(self, num_chars: int) -> str:
        taken, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        return taken
