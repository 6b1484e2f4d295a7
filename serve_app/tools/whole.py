"""Parts a text that has ended into content and calls."""

from __future__ import annotations

from collections.abc import Callable, Collection

from serve_app.core.tools import ToolCall
from serve_app.tools.forms import Form
from serve_app.tools.parsed import new_call_id
from serve_app.tools.parser import ToolCallParser


def parse_whole(
    form: Form, text: str, names: Collection[str], *, new_id: Callable[[], str] = new_call_id
) -> tuple[str, tuple[ToolCall, ...]]:
    """The content and the calls of a text that has ended; a call that is not whole is content to the letter."""
    parser = ToolCallParser(form, names, new_id=new_id, holds_calls=True)
    parts = parser.feed(text), parser.flush()
    deltas = [call for part in parts for call in part.calls]
    calls = tuple(
        ToolCall(id=each.id or "", name=each.name, arguments=each.arguments) for each in deltas if each.name is not None
    )
    return "".join(part.content for part in parts), calls
