"""Functions that a model may call, and the choice among them, as OpenAI and mistral.rs write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.api.shown import shown
from serve_app.core.errors import InvalidRequest
from serve_app.core.tools import Tool, ToolChoice

MAX_TOOLS = 128
MAX_NAME_CHARS = 128
NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_NAME_CHARS}}}")
NAME_WORDS = f'a name of 1 to {MAX_NAME_CHARS} letters, digits, "_", "-", ".", ":" and "/"'
TOOL_WORDS = 'an object of "type" "function" with a "function" that has a "name"'
MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolList:
    """Functions, each with its own name."""

    def words(self, terms: Terms) -> str:
        limit = terms.limits.max_constraint_chars
        one = f'{TOOL_WORDS}, and may have "description", "parameters" and "strict"'
        return f"a list of at most {MAX_TOOLS} functions, of {limit} characters in all, each {one}"

    def schema(self, terms: Terms) -> Schema:
        function = {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
                "description": _nullable({"type": "string"}),
                "parameters": _nullable({"type": "object", "properties": {"type": {"const": "object"}}}),
                "strict": _nullable({"type": "boolean"}),
            },
        }
        return {"type": "array", "maxItems": MAX_TOOLS, "items": _of_function(function)}

    def read(self, value: Value) -> tuple[Tool, ...]:
        elements = value.elements(MAX_TOOLS, self.words(value.terms))
        tools = tuple(_tool(value, at, element) for at, element in enumerate(elements))
        seen: dict[str, int] = {}
        for tool in tools:
            first = seen.setdefault(tool.name, tool.at)
            if first != tool.at:
                path = f"{value.name}[{tool.at}].function.name"
                must = f"be another than that of {value.name}[{first}]"
                raise InvalidRequest.refusing(path, must=must, found=shown(tool.name))
        _check_length(value, elements)
        return tools


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode, or the function that is to be called; OpenAI's allowed tools are a mode and some functions."""

    def words(self, terms: Terms) -> str:
        return f'"none" or "auto" or "required", or {TOOL_WORDS}, or one of "type" "allowed_tools"'

    def schema(self, terms: Terms) -> Schema:
        named = _of_function({"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}})
        allowed = {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": named, "minItems": 1, "maxItems": MAX_TOOLS},
            },
        }
        of_allowed = {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": allowed},
        }
        return {"anyOf": [{"enum": list(MODES)}, named, of_allowed]}

    def read(self, value: Value) -> ToolChoice:
        match value.sent:
            case "none" | "auto" | "required" as mode:
                return ToolChoice(mode=mode)
            case {"type": "function"}:
                return ToolChoice(mode="required", names=(_chosen(value, value.sent),))
            case {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]},
            } if 1 <= len(tools) <= MAX_TOOLS:
                return ToolChoice(mode=mode, names=tuple(dict.fromkeys(_chosen(value, tool) for tool in tools)))
            case _:
                raise value.refused(self.words(value.terms))


def _check_length(value: Value, tools: Sequence[object]) -> None:
    """Some of it may become a constraint, and all of it a prompt."""
    limit = value.terms.limits.max_constraint_chars
    num_chars = sum(len(json.dumps(tool)) for tool in tools)
    if num_chars > limit:
        must = f"be of at most {limit} characters in all, as JSON"
        raise InvalidRequest.refusing(value.name, must=must, found=str(num_chars))


def _chosen(value: Value, tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            raise value.refused(Choice().words(value.terms))


def _tool(value: Value, at: int, element: object) -> Tool:
    match element:
        case {"type": "function", "function": {"name": str(name), **function}} if isinstance(element, dict):
            pass
        case _:
            raise value.part_refused(at, TOOL_WORDS, element)
    path = f"{value.name}[{at}].function"
    if not NAME.fullmatch(name):
        raise _refused(f"{path}.name", NAME_WORDS, name)
    description = function.get("description")
    if not isinstance(description, str | None):
        raise _refused(f"{path}.description", "a string", description)
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise _refused(f"{path}.strict", "a boolean", strict)
    return Tool(
        name=name,
        at=at,
        sent=element,
        description=description or "",
        parameters=_parameters(path, function.get("parameters")),
        is_strict=strict is True,
    )


def _parameters(path: str, parameters: object) -> Mapping[str, Any] | None:
    if parameters is None:
        return None
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _refused(f"{path}.parameters", "the JSON schema of an object", parameters)
    return parameters


def _refused(path: str, allowed: str, found: object) -> InvalidRequest:
    return InvalidRequest.refusing(path, must=f"be {allowed}", found=shown(found))


def _of_function(function: Schema) -> Schema:
    return {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": function},
    }


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}
