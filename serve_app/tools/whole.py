"""Which parser reads a form; and a text that has ended, parted into content and calls by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serve_app.core.tools import Tool, ToolCall
from serve_app.tools.forms import AnyForm, MarkedForm
from serve_app.tools.marked import MarkedCallParser
from serve_app.tools.parsed import new_call_id
from serve_app.tools.parser import ToolCallParser

AnyParser = ToolCallParser | MarkedCallParser


def call_parser(
    form: AnyForm, tools: Sequence[Tool], *, new_id: Callable[[], str] = new_call_id, holds_calls: bool = False
) -> AnyParser:
    """Of one text in which these may be called; see `ToolCallParser`."""
    if isinstance(form, MarkedForm):
        return MarkedCallParser(form, tools, new_id=new_id, holds_calls=holds_calls)
    return ToolCallParser(form, [tool.name for tool in tools], new_id=new_id, holds_calls=holds_calls)


def parse_whole(
    form: AnyForm, text: str, tools: Sequence[Tool], *, new_id: Callable[[], str] = new_call_id
) -> tuple[str, tuple[ToolCall, ...]]:
    """The content and the calls of a text that has ended; a call that is not whole is content to the letter."""
    parser = call_parser(form, tools, new_id=new_id, holds_calls=True)
    parts = parser.feed(text), parser.flush()
    deltas = [call for part in parts for call in part.calls]
    calls = tuple(
        ToolCall(id=each.id or "", name=each.name, arguments=each.arguments) for each in deltas if each.name is not None
    )
    return "".join(part.content for part in parts), calls
