"""Parts a text into content and calls, as it comes."""

from __future__ import annotations

from collections.abc import Callable, Collection

from serve_app.tools.forms import Form
from serve_app.tools.heads import Head, Incomplete, NoCall, read_named_head, read_object_head, read_object_rest
from serve_app.tools.json_scan import JsonScanner
from serve_app.tools.marks import skip_space
from serve_app.tools.parsed import Gains, new_call_id
from serve_app.tools.parting import MAX_HELD_CHARS, Parting


class ToolCallParser(Parting):
    """Content and calls of one text in this form.

    Marks and calls are no content; white space before a call without a mark, between calls and behind the last is
    neither. Everything else is
    content, in its order and to the letter, however the text is split. A call begins to be given once its name is one
    of `names` and its arguments begin to be an object; what cannot become a call is content, from its mark on. What
    was given cannot be taken back: where arguments stop being JSON, their call ends there and the rest is content.

    holds_calls: give each call in one piece and only once its arguments are whole; then nothing is given that would
                 have to be taken back
    has_calls, is_whole: whether there was a call; whether the last one had all of its arguments
    """

    def __init__(
        self,
        form: Form,
        names: Collection[str],
        *,
        new_id: Callable[[], str] = new_call_id,
        holds_calls: bool = False,
    ) -> None:
        super().__init__(form.opener, names, new_id=new_id, holds_calls=holds_calls)
        self._form = form
        self._phase = self._first
        self._is_in_list = False
        self._head = Head(name="", at=0)
        self._scanner = JsonScanner()
        self._num_scanned = 0

    def _first(self, gains: Gains) -> bool:
        """Nothing but white space has come."""
        start = skip_space(self._buffer, 0)
        begins = "{[" if self._form.takes_list else "{"
        if start == len(self._buffer) and not self._is_last:
            return False
        if self._form.begins_bare and start < len(self._buffer) and self._buffer[start] in begins:
            if self._buffer[start] == "{" or not self._may_become_opener(start):
                self._open("", skipping=0)
                return True
            if not self._is_last and not self._buffer.startswith(self._form.opener, start):
                return False
        self._phase = self._outside
        return True

    def _may_become_opener(self, at: int) -> bool:
        opener, text = self._form.opener, self._buffer[at : at + len(self._form.opener)]
        return bool(opener) and opener.startswith(text)

    def _open(self, mark: str, *, skipping: int) -> None:
        self._take(skipping)
        self._opened = mark
        self._is_in_list = False
        self._phase = self._before_arguments

    def _before_arguments(self, gains: Gains) -> bool:
        try:
            head = self._read_head()
        except Incomplete:
            return not self._may_grow() and self._give_back(gains)
        except NoCall:
            return self._give_back(gains)
        if head.at > MAX_HELD_CHARS:
            return self._give_back(gains)
        self._head = head
        if head.arguments is not None:
            self._begin(gains, head.name, head.arguments)
            self._end_call(head.at)
            return True
        self._scanner = JsonScanner()
        if not self._holds_calls:
            self._begin(gains, head.name, "")
            self._take(head.at)
            self._opened = ""
        self._num_scanned = 0 if not self._holds_calls else head.at
        self._phase = self._arguments
        return True

    def _read_head(self) -> Head:
        """Raises Incomplete, NoCall."""
        text, form = self._buffer, self._form
        at = skip_space(text, 0)
        if at == len(text):
            raise Incomplete
        if text[at] == "[" and form.takes_list and not self._is_in_list:
            at = skip_space(text, at + 1)
            if at == len(text):
                raise Incomplete
            head = self._read_object(at)
            self._is_in_list = True
            return head
        if text[at] != "{" and form.takes_names and self._opened:
            return read_named_head(text, at, self._names)
        return self._read_object(at)

    def _read_object(self, at: int) -> Head:
        if self._buffer[at] != "{":
            raise NoCall
        return read_object_head(self._buffer, at, self._names)

    def _give_back(self, gains: Gains) -> bool:
        """What was held is no call: its mark is content, and what follows is read anew."""
        if self._opened:
            gains.content.append(self._opened)
        else:
            gains.content.append(self._take(skip_space(self._buffer, 0) + 1))
        self._opened = ""
        self._phase = self._outside
        return True

    def _arguments(self, gains: Gains) -> bool:
        """The arguments' object; strict, so that its pieces are JSON as far as they go."""
        end = self._num_scanned = self._scanner.feed(self._buffer, self._num_scanned)
        if self._holds_calls:
            return self._held_arguments(gains, end)
        if end:
            self._go_on(gains, self._take(end))
            self._num_scanned = 0
        match self._scanner.state:
            case "complete":
                self._end_call(0)
            case "broken":
                self._phase = self._outside
            case "open":
                return False
        return True

    def _held_arguments(self, gains: Gains, end: int) -> bool:
        match self._scanner.state:
            case "complete":
                self._begin(gains, self._head.name, self._buffer[self._head.at : end])
                self._end_call(end)
            case "open" if not self._is_last:
                return False
            case _:
                return self._give_back(gains)
        return True

    def _end_call(self, at: int) -> None:
        """The arguments are whole and end there."""
        self._take(at)
        self._opened = ""
        self.is_whole = True
        has_rest = not self._head.is_named and self._head.arguments is None
        self._phase = self._behind_arguments if has_rest else self._behind_call

    def _behind_arguments(self, gains: Gains) -> bool:
        """What belongs to the call's object and says nothing."""
        try:
            end = read_object_rest(self._buffer, 0)
        except Incomplete:
            if self._may_grow():
                return False
            end = 0
        except NoCall:
            end = 0
        self._take(end if end <= MAX_HELD_CHARS else 0)
        self._phase = self._behind_call if 0 < end <= MAX_HELD_CHARS else self._outside
        return True

    def _behind_call(self, gains: Gains) -> bool:
        """What ends a call, or leads to the next; otherwise content goes on."""
        form, at = self._form, skip_space(self._buffer, 0)
        ends = ("]",) if self._is_in_list else (form.closer,) if form.closer else ()
        found = self._found(at, (*ends, form.opener))
        if found is None:
            return False
        if found in ends and found:
            self._take(at + len(found))
            self._phase = self._between_calls
            return True
        separator = "," if self._is_in_list else form.separator
        if not found and separator and self._buffer.startswith(separator, at):
            return self._behind_separator(at, separator)
        return self._after(at, found)

    def _behind_separator(self, at: int, separator: str) -> bool:
        """Another call follows a separator at once, or it is content with what follows."""
        next_at = skip_space(self._buffer, at + len(separator))
        if next_at == len(self._buffer) and not self._is_last:
            return False
        if next_at < len(self._buffer) and self._buffer[next_at] == "{":
            self._opened = self._take(next_at)
            self._phase = self._before_arguments
        else:
            self._phase = self._outside
        return True
