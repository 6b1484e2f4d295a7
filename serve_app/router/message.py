"""Reads one text of a chat as it comes: what was thought, what was said, which tools were called."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.api.chat import ChatRequest
from serve_app.core.delta import Finish, FinishReason
from serve_app.core.tools import ToolCallDelta
from serve_app.router.reasoning import ReasoningSplitter, Split, is_thinking
from serve_app.tools.forms import AnyForm
from serve_app.tools.parsed import Parsed
from serve_app.tools.whole import AnyParser, call_parser


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a piece of the text adds to its message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: FinishReason | None = None


class MessageReader:
    """Thoughts first, then calls within what is said.

    splitter: None where there are no thoughts;  parser: None where nothing may be called
    is_parallel: False keeps the first call alone
    """

    def __init__(
        self, splitter: ReasoningSplitter | None, parser: AnyParser | None, *, is_parallel: bool = True
    ) -> None:
        self._splitter = splitter
        self._parser = parser
        self._is_parallel = is_parallel

    @property
    def is_text_alone(self) -> bool:
        """Whether what it reads is what is said, piece by piece."""
        return self._splitter is None and self._parser is None

    def read(self, text: str, finish: Finish | None) -> Gain:
        """Take more of the text; with its finish, the last of it."""
        split = self._split(text, is_last=finish is not None)
        parsed = self._parsed(split.content, is_last=finish is not None)
        calls = parsed.calls if self._is_parallel else tuple(call for call in parsed.calls if call.index == 0)
        reason = None if finish is None else self._reason(finish)
        return Gain(content=parsed.content, reasoning=split.reasoning, calls=calls, finish_reason=reason)

    def _split(self, text: str, *, is_last: bool) -> Split:
        if self._splitter is None:
            return Split(content=text)
        split = self._splitter.feed(text)
        return split + self._splitter.flush() if is_last else split

    def _parsed(self, text: str, *, is_last: bool) -> Parsed:
        if self._parser is None:
            return Parsed(content=text)
        fed = self._parser.feed(text)
        if not is_last:
            return fed
        rest = self._parser.flush()
        return Parsed(content=fed.content + rest.content, calls=fed.calls + rest.calls)

    def _reason(self, finish: Finish) -> FinishReason:
        """A text that ended by itself behind a call ended for that."""
        has_called = self._parser is not None and self._parser.has_calls and self._parser.is_whole
        return FinishReason.TOOL_CALLS if has_called and finish.reason is FinishReason.STOP else finish.reason


def message_reader(request: ChatRequest, form: AnyForm, *, before: str | None) -> MessageReader:
    """Of one text of this request.

    form:   of calls, as the model writes them
    before: what stands before the text; None where thoughts are not told apart
    """
    tools, parser = request.tool_use, None
    has_thoughts = before is not None and tools.choice.mode != "required"  # a demanded call is there from the beginning
    splitter = ReasoningSplitter(is_thinking=is_thinking(before)) if before is not None and has_thoughts else None
    if tools.usable:
        parser = call_parser(form, tools.usable, holds_calls=not request.stream)
    return MessageReader(splitter, parser, is_parallel=tools.is_parallel)
