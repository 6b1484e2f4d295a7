"""Says as a constraint what calls a text may or must hold, in the form that its model writes them in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from serve_app.core.constraint import Constraint
from serve_app.core.tools import Tool, Tools
from serve_app.tools.forms import AnyForm, FormName, MarkedForm

ANY_ARGUMENTS: Mapping[str, Any] = MappingProxyType({"type": "object"})
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({"type": "object", "additionalProperties": False})
COMBINED = frozenset(("json_schema", "regex", "gbnf"))
"""Kinds of constraints that calls can stand beside, as another thing that the text may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What is written before a key, between it and its value, and behind that."""

    key: str
    value: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is written around calls.

    opening, closing: before the first and behind the last
    separator: between two, where there may be several
    begin, end: around the arguments of one; {name} is its name
    marks: around each argument, where these are no JSON
    """

    opening: str = ""
    closing: str = ""
    separator: str
    begin: str = '{{"name": "{name}", "arguments": '
    end: str = "}"
    marks: Marks | None = None


LAYOUTS: Mapping[FormName, Layout] = MappingProxyType(
    {
        "hermes": Layout(opening="<tool_call>\n", closing="\n</tool_call>", separator="\n</tool_call>\n<tool_call>\n"),
        "llama3": Layout(begin='{{"name": "{name}", "parameters": ', separator="; "),
        "mistral": Layout(opening="[TOOL_CALLS][", closing="]", separator=", "),
        "mistral_named": Layout(opening="[TOOL_CALLS]", separator="[TOOL_CALLS]", begin="{name}[ARGS]", end=""),
        "json": Layout(separator=", "),
    }
)
JSON_LIST = Layout(opening="[", closing="]", separator=", ")


def call_constraint(tools: Tools, form: AnyForm, beside: Constraint | None = None) -> Constraint | None:
    """What the text has to be, `beside` being what else is demanded of it; None is any text.

    Where calls are required it is one of them, or several where these are parallel. Where the model chooses, it may
    also be what `beside` says; without that it is any text, in which a call that begins is one of these, as soon as one
    of them is strict. Arguments of strict tools satisfy their schema. So do those of others where a call is required
    and all of their schemas can be followed, which nobody promised; otherwise they are any object.
    """
    is_required = tools.choice.mode == "required"
    if not tools.usable or (beside is not None and (is_required or beside.kind not in COMBINED)):
        return beside
    if not is_required and beside is None and not any(tool.is_strict for tool in tools.usable):
        return None
    layout = _layout(form, tools)
    source = {
        "is_required": is_required,
        "trigger": form.opener if layout.opening.startswith(form.opener) else "",
        "opening": layout.opening,
        "closing": layout.closing,
        "separator": layout.separator if tools.is_parallel else None,
        "calls": [_call(tool, layout, is_required=is_required) for tool in tools.usable],
        "beside": None if beside is None else {"kind": beside.kind, "source": beside.source, "name": beside.name},
    }
    return Constraint(kind="tools", source=json.dumps(source, separators=(",", ":")), name="tools")


def _layout(form: AnyForm, tools: Tools) -> Layout:
    if not isinstance(form, MarkedForm):
        return JSON_LIST if form.name == "json" and tools.is_parallel else LAYOUTS[form.name]
    space = form.space
    is_named = bool(form.before_name)
    return Layout(
        opening=form.opener + (space if is_named else ""),
        closing=form.closer,
        separator=f"{form.closer}{space}{form.opener}{space if is_named else ''}",
        begin=f"{form.before_name}{{name}}{form.after_name}{space}",
        end=f"{form.inner_closer}{space}" if form.inner_closer else "",
        marks=Marks(
            key=form.key,
            value=space.join(form.value) + form.value_space,
            end=f"{form.value_space}{form.end}{space}",
        ),
    )


def _call(tool: Tool, layout: Layout, *, is_required: bool) -> dict[str, object]:
    """at: the tool's place in the list that was sent"""
    begin = layout.begin.format(name=tool.name)
    marks = None if layout.marks is None else asdict(layout.marks)
    return {
        "begin": begin,
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
