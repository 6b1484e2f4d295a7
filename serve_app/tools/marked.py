"""Parts a text into content and calls whose arguments stand each between marks, as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from serve_app.core.tools import Tool
from serve_app.tools.forms import MarkedForm
from serve_app.tools.heads import Incomplete, NoCall
from serve_app.tools.marks import skip_space
from serve_app.tools.parsed import Gains, new_call_id
from serve_app.tools.parting import Parting
from serve_app.tools.values import Values, values_of

_NAME = re.compile(r"[A-Za-z0-9_.:/\-]*")
_KEY = re.compile(r"[^<>\r\n]*")


class MarkedCallParser(Parting):
    """The same promises as `ToolCallParser`'s, for calls of the other kind of form.

    A call begins to be given once its name is one of the tools' and a mark follows it; each argument is given once it
    is whole, as JSON of a type that the tool's schema allows it. A call is whole behind its last mark.

    tools: what may be called
    """

    def __init__(
        self,
        form: MarkedForm,
        tools: Sequence[Tool],
        *,
        new_id: Callable[[], str] = new_call_id,
        holds_calls: bool = False,
    ) -> None:
        values = {tool.name: values_of(tool) for tool in tools}
        super().__init__(form.opener, values, new_id=new_id, holds_calls=holds_calls)
        self._form = form
        self._values: Mapping[str, Values] = values
        self._name = ""
        self._keys: set[str] = set()
        self._value_at = 0  # of the argument that is being read
        self._key = ""
        self._searched = 0
        self._read: list[str] = []  # what was taken of a call that is held
        self._arguments: list[str] = []

    def _open(self, mark: str, *, skipping: int) -> None:
        self._take(skipping)
        self._opened = mark
        self._phase = self._before_arguments

    def _before_arguments(self, gains: Gains) -> bool:
        try:
            at = self._head()
        except Incomplete:
            return not self._may_grow() and self._give_back(gains)
        except NoCall:
            return self._give_back(gains)
        self._keys, self._read, self._arguments = set(), [], []
        if self._holds_calls:
            self._read.append(self._take(at))
        else:
            self._begin(gains, self._name, "")
            self._take(at)
            self._opened = ""
        self._phase = self._between_arguments
        return True

    def _head(self) -> int:
        """The place behind the name. Raises Incomplete, NoCall."""
        form, text = self._form, self._buffer
        at = _behind(text, 0, (form.before_name,) if form.before_name else ())
        at = skip_space(text, at)
        found = _NAME.match(text, at)
        assert found is not None
        if found.end() == len(text):
            raise Incomplete
        self._name = found.group()
        if self._name not in self._names:
            raise NoCall
        return _behind(text, found.end(), (form.after_name,) if form.after_name else ())

    def _between_arguments(self, gains: Gains) -> bool:
        """Another argument, or the end of all."""
        form, at = self._form, skip_space(self._buffer, 0)
        closers = tuple(filter(None, (form.inner_closer, form.closer)))
        found = self._found(at, (form.key, *closers))
        if found is None:
            return False
        if found == form.key:
            return self._argument(gains, at + len(found))
        if not found:
            return self._break(gains)
        self._note(at + len(found))
        self._end(gains, is_closed=found == form.closer)
        return True

    def _argument(self, gains: Gains, at: int) -> bool:
        """One argument, whose key begins there."""
        try:
            self._value_at = self._searched = self._key_from(at)
        except Incomplete:
            return not self._may_grow() and self._break(gains)
        except NoCall:
            return self._break(gains)
        self._phase = self._value
        return True

    def _value(self, gains: Gains) -> bool:
        """The rest of an argument, behind its key. It stays in the buffer until it is whole."""
        end = self._buffer.find(self._form.end, self._searched)
        if end < 0:
            self._searched = max(self._value_at, len(self._buffer) - len(self._form.end) + 1)
            return self._is_last and self._break(gains)
        space = self._form.value_space
        value = self._buffer[self._value_at : end].removeprefix(space).removesuffix(space)
        written = json.dumps(self._key, ensure_ascii=False)
        before = ", " if self._keys else "{"
        self._give(gains, f"{before}{written}: {self._values[self._name].json_of(self._key, value)}")
        self._keys.add(self._key)
        self._note(end + len(self._form.end))
        self._phase = self._between_arguments
        return True

    def _key_from(self, at: int) -> int:
        """Read the key; return the place of its value. Raises Incomplete, NoCall."""
        found = _KEY.match(self._buffer, at)
        assert found is not None
        if found.end() == len(self._buffer):
            raise Incomplete
        self._key = found.group().strip()
        if not self._key or self._key in self._keys:
            raise NoCall
        return _behind(self._buffer, found.end(), self._form.value)

    def _give(self, gains: Gains, arguments: str) -> None:
        if self._holds_calls:
            self._arguments.append(arguments)
        else:
            self._go_on(gains, arguments)

    def _note(self, at: int) -> None:
        """Take from the buffer what belongs to the call."""
        taken = self._take(at)
        if self._holds_calls:
            self._read.append(taken)

    def _end(self, gains: Gains, *, is_closed: bool) -> None:
        self._give(gains, "}" if self._keys else "{}")
        if self._holds_calls:
            self._begin(gains, self._name, "".join(self._arguments))
        self._opened = ""
        self.is_whole = True
        self._phase = self._between_calls if is_closed else self._behind_inner_closer

    def _behind_inner_closer(self, gains: Gains) -> bool:
        """The mark around the call, or the next call, where it was forgotten."""
        at = skip_space(self._buffer, 0)
        found = self._found(at, (self._form.closer, self._opener))
        if found is None:
            return False
        if found != self._form.closer:
            return self._after(at, found)
        self._take(at + len(found))
        self._phase = self._between_calls
        return True

    def _break(self, gains: Gains) -> bool:
        """What is there belongs to no call."""
        if self._holds_calls:
            self._buffer = "".join(self._read) + self._buffer
            return self._give_back(gains)
        self._phase = self._outside
        return True

    def _give_back(self, gains: Gains) -> bool:
        """What was held is no call: its mark is content, and what follows is read anew."""
        gains.content.append(self._opened)
        self._opened = ""
        self._phase = self._outside
        return True


def _behind(text: str, at: int, marks: Sequence[str]) -> int:
    """The place behind marks with white space before each. Raises Incomplete, NoCall."""
    for mark in marks:
        at = skip_space(text, at)
        if text.startswith(mark, at):
            at += len(mark)
        elif mark.startswith(text[at:]):
            raise Incomplete
        else:
            raise NoCall
    return at
