"""Says as a constraint what calls a text may or must hold, in the form that its model writes them in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from serve_app.core.request import Constraint
from serve_app.core.tools import Tool, Tools
from serve_app.tools.forms import KEY, NAME, Form

ANY_ARGUMENTS: Mapping[str, Any] = MappingProxyType({"type": "object"})
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({"type": "object", "additionalProperties": False})
COMBINED = frozenset(("json_schema", "regex", "gbnf"))
"""Kinds of constraints that calls can stand beside, as another thing that the text may be."""
OF_CONTENT = "json_schema"
"""The kind that says what an answer holds. The others say what the whole text is, calls included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is written around calls.

    trigger: what begins calls within other text; "" is nothing, so that they begin the text
    opening, closing: before the first and behind the last
    separator: between two
    begin, end: around the arguments of one; {name} is its name
    """

    trigger: str
    opening: str
    closing: str
    separator: str
    begin: str
    end: str


def call_constraint(tools: Tools, form: Form, beside: Constraint | None = None) -> Constraint | None:
    """What the text has to be, `beside` being what else is demanded of it; None is any text.

    Where calls are required it is one of them, or several where these are parallel. Where the model chooses, it may
    also be what `beside` says; without that it is any text, in which a call that begins is one of these, as soon as one
    of them is strict. Without a strict tool, an expression or a grammar beside holds the whole text. Arguments of
    strict tools satisfy their schema. So do those of others where a call is required and all of their schemas can be
    followed, which nobody promised; otherwise they are any object.
    """
    is_required = tools.choice.mode == "required"
    if not tools.usable or (beside is not None and (is_required or beside.kind not in COMBINED)):
        return beside
    is_free = not is_required and not any(tool.is_strict for tool in tools.usable)
    if is_free and (beside is None or beside.kind != OF_CONTENT):
        return beside
    layout = layout_of(form, is_parallel=tools.is_parallel)
    source = {
        "is_required": is_required,
        "trigger": layout.trigger,
        "opening": layout.opening,
        "closing": layout.closing,
        "separator": layout.separator if tools.is_parallel else None,
        "calls": [_call(tool, form, layout, is_required=is_required) for tool in tools.usable],
        "beside": None if beside is None else {"kind": beside.kind, "source": beside.source, "name": beside.name},
    }
    return Constraint(kind="tools", source=json.dumps(source, separators=(",", ":")), name="tools")


def layout_of(form: Form, *, is_parallel: bool) -> Layout:
    """How a demanded call is written in this form."""
    opener, closing, ends = form.openers[0], "".join(form.closers), "".join(form.ends)
    is_list = form.written == "list" or (form.name == "json" and is_parallel)
    default = ", " if is_list else f"{closing}\n{opener}"
    separator = default if form.separator is None else form.separator
    begin, end = f'{{"name": "{NAME}", "{form.arguments}": ', "}"
    trigger = opener.strip()
    if form.written == "head":
        begin = "".join(token.removeprefix("?") for token in form.heads[0] if not token.startswith("~"))
        end = ends
        if not trigger:
            opener, _, rest = begin.partition(NAME)
            trigger, separator, begin = opener.split(" ")[-1], separator + opener, NAME + rest
    elif is_list:
        opener, closing = f"{opener}[", f"]{closing}"
    return Layout(trigger=trigger, opening=opener, closing=closing, separator=separator, begin=begin, end=end)


def _call(tool: Tool, form: Form, layout: Layout, *, is_required: bool) -> dict[str, object]:
    """at: the tool's place in the list that was sent"""
    marks = None
    if form.between is not None and form.written == "head":
        before, _, between = "".join(token for token in form.between.key if not token.startswith("~")).partition(KEY)
        marks = {"key": before, "value": between, "end": form.between.end}
    return {
        "begin": layout.begin.replace(NAME, tool.name),
        "end": layout.end,
        "schema": _schema(tool) if tool.is_strict or is_required else dict(ANY_ARGUMENTS),
        "is_strict": tool.is_strict,
        "at": tool.at,
        "marks": marks,
    }


def _schema(tool: Tool) -> dict[str, Any]:
    if tool.parameters is None:
        return dict(NO_ARGUMENTS if tool.is_strict else ANY_ARGUMENTS)
    return {"type": "object", **tool.parameters}
