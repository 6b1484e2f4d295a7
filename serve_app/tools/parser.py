"""Splits a model's text into content and calls while it arrives."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from serve_app.core.tools import Tool, ToolCall, ToolCallDelta, joined_calls
from serve_app.tools.forms import PARENTHESIS, Form, mark_of
from serve_app.tools.heads import (
    EVERY_TYPE,
    STRING,
    Head,
    Incomplete,
    NoCall,
    json_of,
    read_object_head,
    read_object_rest,
    read_tokens,
    skip_space,
    types_of_arguments,
)
from serve_app.tools.literals import LiteralReader, MarkFinder

MAX_HELD_CHARS = 4096
"""Of what stands before and behind the arguments of a call; longer it is content."""
T = TypeVar("T")


def new_call_id() -> str:
    """Return nine letters and digits, which Mistral's templates require."""
    return secrets.token_hex(8)[:9]


@dataclass(slots=True)
class Parsed:
    """What a piece of a text has added: content, and deltas of calls."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class CallParser:
    """Content and calls of one text in a form.

    Marks and calls are no content; white space before a call without a mark, between calls and behind the last is
    neither. Everything else is content, in its order and to the letter, however the text is split. A call begins to be
    given once its name is one of the tools' and its arguments begin; what cannot become a call is content, from its
    mark on. What was given cannot be taken back: where arguments stop being any, the call ends there and the rest is
    content. A text that ended by itself has its last call completed: brackets that lack are closed.

    shows_marks: marks of the form that belong to no call are content, too
    has_calls, is_whole: whether there was a call; whether the last one had all of its arguments
    """

    def __init__(
        self, form: Form, tools: Sequence[Tool], *, new_id: Callable[[], str] = new_call_id, shows_marks: bool = True
    ) -> None:
        self.num_calls = 0
        self.is_whole = False
        self._types = {tool.name: types_of_arguments(tool) for tool in tools}
        self._is_strict = any(tool.is_strict for tool in tools)
        self._forms = (form,) if self._is_strict else (form, *form.others)
        self._dropped = frozenset() if shows_marks else form.special_marks
        self._starts, self._finder = _marks(self._forms, self._dropped, is_strict=self._is_strict)
        self._new_id = new_id
        self._buffer = ""
        self._is_last = self._is_cut = False
        self._phase: Callable[[Parsed], bool] = self._first
        # of the call that is being read
        self._candidates: Sequence[tuple[Form, int]] = ()  # with the places where it may begin
        self._mark = ""  # that it was begun by
        self._num_back = 0  # characters of the buffer that are content where it turns out to be no call
        self._form = form
        self._name = ""
        self._is_in_list = False
        self._literal = LiteralReader()
        self._num_open = 0
        self._keys = 0
        self._key, self._is_string = "", False
        self._value_at = self._searched = 0

    @property
    def has_calls(self) -> bool:
        return self.num_calls > 0

    def feed(self, text: str) -> Parsed:
        """Take more of the text."""
        self._buffer += text
        return self._parsed()

    def flush(self, *, is_cut: bool = False) -> Parsed:
        """End the text and return what the held-back rest turns out to be. is_cut: the text did not end by itself"""
        self._is_last, self._is_cut = True, is_cut
        return self._parsed()

    def _parsed(self) -> Parsed:
        gains = Parsed()
        with suppress(Incomplete):
            while self._phase(gains):
                pass
        return gains

    # Each phase takes from the buffer and returns whether another one is to go on with what is left. If more of the
    # text has to come, it raises Incomplete, and has changed nothing.

    def _tried(self, read: Callable[[], T]) -> T | None:
        """Return what is read; None where it is no call and cannot become one. Raises Incomplete where it still may."""
        try:
            return read()
        except NoCall:
            return None
        except Incomplete:
            if self._is_last or len(self._buffer) > MAX_HELD_CHARS:
                return None
            raise

    def _first(self, gains: Parsed) -> bool:
        """Handle the start of the text: only white space has come, so a call may begin without a mark."""
        start = skip_space(self._buffer, 0)
        rest = self._buffer[start:]
        may_begin = self._finder.may_begin(rest)
        if not self._is_last and may_begin and self._finder.find(rest) == (0, ""):
            return False
        is_demanded = not self._form.openers[0] and self._form.written != "head"
        if not may_begin and (is_demanded or not self._is_strict):
            self._try([(form, start) for form in self._forms], mark="", num_back=0)
        else:
            self._phase = self._outside
        return True

    def _outside(self, gains: Parsed) -> bool:
        """Handle content up to the next mark."""
        at, mark = self._finder.find(self._buffer, is_last=self._is_last)
        gains.content += self._take(at)
        self._is_in_list = False
        if mark in self._starts:
            candidates = sorted(self._starts[mark], key=lambda each: each[0] is not self._form)
            self._try(candidates, mark=mark, num_back=len(mark))
        else:
            self._take(len(mark))
        return bool(mark)

    def _try(self, candidates: Sequence[tuple[Form, int]], *, mark: str, num_back: int) -> None:
        """Handle a place where a call may begin."""
        self._candidates, self._mark, self._num_back = candidates, mark, num_back
        self._phase = self._before_arguments

    def _before_arguments(self, gains: Parsed) -> bool:
        head = self._tried(self._head)
        if head is None:
            return self._give_back(gains)
        self._name = head.name
        self._begin(gains, head.arguments or "")
        self._take(head.at)
        self._num_open = head.num_open
        if head.arguments is not None:
            self._end_call()
        elif self._buffer[:1] in ("{", "("):
            self._literal = LiteralReader(is_call=self._buffer[0] == "(")
            self._phase = self._arguments
        else:
            self._keys = 0
            self._phase = self._between_arguments
        return True

    def _give_back(self, gains: Parsed) -> bool:
        """Return a rejected mark to the content and read on behind it."""
        mark = self._take(self._num_back)
        gains.content += "" if mark in self._dropped else mark
        self._is_in_list = False
        self._phase = self._outside
        return True

    def _head(self) -> Head:
        """Return the first reading of the held text as a call's head. Raises Incomplete, NoCall."""
        was_in_list = self._is_in_list
        for form, start in self._candidates:
            at = skip_space(self._buffer, start)
            begins_list = self._buffer.startswith("[", at) and not was_in_list
            at = skip_space(self._buffer, at + 1) if begins_list else at
            if at == len(self._buffer):
                raise Incomplete
            self._form, self._is_in_list = form, was_in_list or begins_list
            try:
                head = self._head_in(form, at)
            except NoCall:
                continue
            except Incomplete:
                if self._is_last:
                    continue
                self._is_in_list = was_in_list
                raise
            if head.at <= MAX_HELD_CHARS:
                return head
        self._is_in_list = was_in_list
        raise NoCall

    def _head_in(self, form: Form, at: int) -> Head:
        """Raises Incomplete, NoCall."""
        text = self._buffer
        if text[at] == "{":
            return read_object_head(text, at, self._types, is_marked=bool(self._mark))
        for tokens in form.heads:
            is_python = tokens[-1] == PARENTHESIS
            if self._is_in_list is not is_python and (self._is_in_list or not self._mark):
                continue
            try:
                name, end = read_tokens(tokens, text, at, words=self._types, is_last=self._is_last)
            except NoCall:
                continue
            return Head(name=name, at=end) if is_python else self._named(form, name, end)
        raise NoCall

    def _named(self, form: Form, name: str, end: int) -> Head:
        """Handle a call whose name is read; its arguments may be missing if a mark says that it is a call."""
        at = skip_space(self._buffer, end)
        if self._buffer.startswith("{", at):
            return Head(name=name, at=at)
        found = self._found(at, (form.key_mark, *form.behind, *self._starts))
        if form.between is not None and found == form.key_mark:
            return Head(name=name, at=at)
        if not self._mark or self._is_cut or not (found or at == len(self._buffer)):
            raise NoCall
        return Head(name=name, at=at, arguments="{}")

    def _arguments(self, gains: Parsed) -> bool:
        """Handle the literal of a call's arguments."""
        literal = self._literal
        self._take(literal.feed(self._buffer, is_last=self._is_last))
        is_complete = literal.state == "complete" or (self._is_last and not self._is_cut and literal.close())
        self._go_on(gains, literal.take())
        if is_complete:
            self._end_call()
            return True
        if literal.state == "open" and not self._is_last:
            return False
        if self._is_cut and re.fullmatch(r"[\w+.\-]*|\\.*", self._buffer):
            self._go_on(gains, self._take(len(self._buffer)))
        self._phase = self._outside
        return True

    def _end_call(self) -> None:
        self.is_whole = True
        self._phase = self._behind_arguments if self._num_open else self._behind_call

    def _behind_arguments(self, gains: Parsed) -> bool:
        """Handle the members of the call's object behind its arguments."""
        end = self._tried(lambda: read_object_rest(self._buffer, 0)) or 0
        self._num_open -= 1
        if 0 < end <= MAX_HELD_CHARS:
            self._take(end)
            self._phase = self._behind_arguments if self._num_open else self._behind_call
        else:
            self._phase = self._behind_call if not self._buffer.strip() and self._is_last else self._outside
        return True

    def _behind_call(self, gains: Parsed) -> bool:
        """Handle what ends a call or leads to the next one; anything else is content."""
        at = skip_space(self._buffer, 0)
        closers = (*self._form.behind, *(("]",) if self._is_in_list else ()))
        found = self._found(at, (*closers, *self._starts))
        if found in closers and found:
            self._take(at + len(found))
            self._is_in_list = self._is_in_list and found != "]"
            return True
        if found or at == len(self._buffer):
            self._take(at)
            self._phase = self._outside
            return bool(self._buffer)
        return self._next_call(at)

    def _next_call(self, at: int) -> bool:
        """Handle the place behind a separator: another call follows, or the separator was content."""
        next_at = skip_space(self._buffer, at + 1) if self._buffer[at] in ",;" else at
        if next_at == len(self._buffer) and not self._is_last:
            return False
        if next_at < len(self._buffer) and (self._buffer[next_at] == "{" or self._form.heads):
            self._try([(self._form, next_at)], mark=self._mark, num_back=0)
        else:
            self._phase = self._outside
        return True

    def _between_arguments(self, gains: Parsed) -> bool:
        """Handle the place between two marked arguments, or behind the last one."""
        at, key = skip_space(self._buffer, 0), self._form.key_mark
        found = self._found(at, (key, *self._form.behind, *self._starts))
        read = self._tried(lambda: self._key_from(at, None)) if found == key else None
        if read is not None:
            self._key, self._value_at = read
            self._searched = self._value_at
            self._phase = self._value
            return True
        rest = self._buffer[at:]
        if self._is_cut and (found == key or any(mark.startswith(rest) for mark in (key, *self._form.behind))):
            self._take(len(self._buffer))
            self._phase = self._outside
            return False
        self._go_on(gains, "}" if self._keys else "{}")
        self._end_call()
        return True

    def _key_from(self, at: int, words: Iterable[str] | None) -> tuple[str, int]:
        """Return the key at a place, and the place of its value. Raises Incomplete, NoCall."""
        marks = self._form.between
        assert marks is not None
        key, end = read_tokens(marks.key, self._buffer, at, words=None, is_last=self._is_last)
        self._is_string = bool(marks.says_string) and marks.says_string in self._buffer[at:end]
        if not key or (words is not None and key not in words):
            raise NoCall
        return key, end

    def _value(self, gains: Parsed) -> bool:
        """Handle a marked argument's value, which stays in the buffer until it is complete."""
        marks = self._form.between
        assert marks is not None
        mark = marks.end.strip()
        end = self._buffer.find(mark, self._searched)
        if end < 0 and not self._is_last:
            self._searched = max(self._value_at, len(self._buffer) - len(mark) + 1)
            return False
        written = f"{', ' if self._keys else '{'}{json.dumps(self._key, ensure_ascii=False)}: "
        self._keys += 1
        whole = self._unclosed(end)
        if whole < 0:
            value = self._buffer[self._value_at :]
            if self._is_cut:
                self._go_on(gains, written + json.dumps(value, ensure_ascii=False)[:-1])
                self._take(len(self._buffer))
                self._phase = self._outside
                return False
            whole = len(self._buffer)
        value = self._buffer[self._value_at : whole]
        if marks.key[-1].endswith("\n"):
            value = value.removeprefix("\n")
        if marks.end.startswith("\n"):
            value = value.removesuffix("\n")
        types = STRING if self._is_string else self._types[self._name].get(self._key, EVERY_TYPE)
        self._go_on(gains, written + json_of(value, types))
        self._take(whole + (len(mark) if whole == end else 0))
        self._phase = self._between_arguments
        return True

    def _unclosed(self, end: int) -> int:
        """Return where the value ends: at its own mark, or before the next argument or call; -1 if nowhere."""
        text, ends = self._buffer[: end if end >= 0 else None], [end] if end >= 0 else []
        at, is_string = text.find(self._form.key_mark, self._value_at), self._is_string
        while at >= 0:
            try:
                self._key_from(at, self._types[self._name])
            except (Incomplete, NoCall):
                at = text.find(self._form.key_mark, at + 1)
            else:
                ends.append(at)
                break
        self._is_string = is_string
        closers = "|".join(map(re.escape, self._form.behind))
        behind = rf"(?=\s*(?:{'|'.join(map(re.escape, self._starts))}))" if end >= 0 else ""
        found = re.compile(rf"(?:\s*(?:{closers}))+{behind}").search(text, self._value_at)
        if found is not None:
            ends.append(found.start() + len(found.group()) - len(found.group().lstrip()))
        return min(ends, default=-1)

    def _begin(self, gains: Parsed, arguments: str) -> None:
        gains.calls.append(ToolCallDelta(index=self.num_calls, id=self._new_id(), name=self._name, arguments=arguments))
        self.num_calls += 1
        self.is_whole = False

    def _go_on(self, gains: Parsed, arguments: str) -> None:
        """Add to the arguments of the call that began last."""
        if arguments:
            gains.calls.append(ToolCallDelta(index=self.num_calls - 1, arguments=arguments))

    def _found(self, at: int, marks: Iterable[str]) -> str:
        """Return which of the marks stands at a place; "" if none. Raises Incomplete if more text is needed."""
        rest, marks = self._buffer[at : at + 256], [mark for mark in marks if mark]
        if not self._is_last and (not rest or any(mark.startswith(rest) and mark != rest for mark in marks)):
            raise Incomplete
        return max((mark for mark in marks if rest.startswith(mark)), key=len, default="")

    def _take(self, num_chars: int) -> str:
        taken, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        return taken


def parse_whole(
    form: Form, text: str, tools: Sequence[Tool], *, new_id: Callable[[], str] = new_call_id, is_cut: bool = False
) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the content and the calls of a complete text."""
    parser = CallParser(form, tools, new_id=new_id)
    parts = parser.feed(text), parser.flush(is_cut=is_cut)
    return "".join(part.content for part in parts), joined_calls(delta for part in parts for delta in part.calls)


@lru_cache(maxsize=256)
def _marks(
    forms: tuple[Form, ...], dropped: frozenset[str], *, is_strict: bool
) -> tuple[Mapping[str, Sequence[tuple[Form, int]]], MarkFinder]:
    """Return what may begin a call in these forms, with the places behind it from which to read, and a finder for it.

    dropped:   further marks to find
    is_strict: nothing begins a call but what a demanded call begins with
    """
    starts: dict[str, list[tuple[Form, int]]] = {}
    for form in forms:
        is_marked = bool(form.openers[0])
        for opener in filter(None, map(mark_of, form.openers[:1] if is_strict and is_marked else form.openers)):
            starts.setdefault(opener, []).append((form, len(opener)))
        for mark in () if is_strict and is_marked else form.head_marks:
            starts.setdefault(mark, []).append((form, 0))
    return starts, MarkFinder((*starts, *dropped))
