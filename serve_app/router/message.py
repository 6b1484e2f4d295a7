"""Reads one text of a chat as it comes: what was thought, what was said, which tools were called."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.api.chat import ChatRequest
from serve_app.api.completion import CompletionRequest
from serve_app.core.cards import ModelCard
from serve_app.core.delta import Finish, FinishReason
from serve_app.core.tools import ToolCallDelta, ToolParserName
from serve_app.router.reasoning import ReasoningSplitter, Split, ThoughtForm, thoughts_for
from serve_app.tools.forms import Form, form_for
from serve_app.tools.parser import CallParser, Parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How a model writes calls and thoughts."""

    calls: Form
    thoughts: ThoughtForm


def writing_of(card: ModelCard | None) -> Writing:
    """Return its operator's choice, else what its template shows; a model that is gone writes as an unknown one."""
    if card is None:
        return Writing(calls=form_for(""), thoughts=thoughts_for(""))
    of_default_text: ToolParserName | None = "hermes" if card.tool_prompt == "prompt" else None
    return Writing(
        calls=form_for(card.template_for(has_tools=True), card.tool_parser or of_default_text),
        thoughts=thoughts_for(card.chat_template, card.reasoning_parser),
    )


def marks_to_show(request: CompletionRequest, writing: Writing) -> tuple[str, ...]:
    """The marks which the text is read by, although special tokens are not shown."""
    if not isinstance(request, ChatRequest) or not request.skip_special_tokens:
        return ()
    of_thoughts = writing.thoughts.marks if request.splits_reasoning else ()
    return of_thoughts + (writing.calls.marks if request.tool_use.usable else ())


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
        self, splitter: ReasoningSplitter | None, parser: CallParser | None, *, is_parallel: bool = True
    ) -> None:
        self._splitter = splitter
        self._parser = parser
        self._is_parallel = is_parallel

    @property
    def is_text_alone(self) -> bool:
        """Whether what it reads from now on is what is said, piece by piece."""
        return self._parser is None and (self._splitter is None or self._splitter.is_over)

    def read(self, text: str, finish: Finish | None) -> Gain:
        """Take more of the text; with its finish, the last of it."""
        split = self._split(text, is_last=finish is not None)
        parsed = self._parsed(split.content, finish)
        calls = parsed.calls if self._is_parallel else tuple(call for call in parsed.calls if call.index == 0)
        reason = None if finish is None else self._reason(finish)
        return Gain(content=parsed.content, reasoning=split.reasoning, calls=calls, finish_reason=reason)

    def _split(self, text: str, *, is_last: bool) -> Split:
        if self._splitter is None:
            return Split(content=text)
        split = self._splitter.feed(text)
        return split + self._splitter.flush() if is_last else split

    def _parsed(self, text: str, finish: Finish | None) -> Parsed:
        if self._parser is None:
            return Parsed(content=text)
        fed = self._parser.feed(text)
        if finish is None:
            return fed
        has_ended_itself = finish.reason is FinishReason.STOP and not isinstance(finish.matched_stop, str)
        rest = self._parser.flush(is_cut=not has_ended_itself)
        return Parsed(content=fed.content + rest.content, calls=fed.calls + rest.calls)

    def _reason(self, finish: Finish) -> FinishReason:
        """A text that ended by itself behind a call ended for that."""
        has_called = self._parser is not None and self._parser.has_calls and self._parser.is_whole
        return FinishReason.TOOL_CALLS if has_called and finish.reason is FinishReason.STOP else finish.reason


def message_reader(request: ChatRequest, writing: Writing, *, before: str) -> MessageReader:
    """Of one text of this request. before: what stands before the text"""
    tools, form, parser = request.tool_use, writing.calls, None
    splitter = ReasoningSplitter(writing.thoughts, before=before) if request.splits_reasoning else None
    if tools.usable:
        parser = CallParser(form, tools.usable, shows_marks=not request.skip_special_tokens)
    return MessageReader(splitter, parser, is_parallel=tools.is_parallel)
