"""Tools beside `tool_choice: "none"`: not to be used, so that they change nothing; any others are refused."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.api.forms.form import Schema
from serve_app.api.shown import shown
from serve_app.core.errors import InvalidRequest

UNUSED = "none"
TOOLS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
        },
    },
}


def without_unused_tools(members: Mapping[str, object]) -> Mapping[str, object]:
    """The members without tools that are not to be used. Raises InvalidRequest for what are no tools."""
    tools = members.get("tools")
    if members.get("tool_choice") != UNUSED or tools is None or tools is False:
        return members
    if not isinstance(tools, list):
        raise InvalidRequest.refusing("tools", must="be a list of functions", found=shown(tools))
    for at, tool in enumerate(tools):
        if not _is_tool(tool):
            raise InvalidRequest.refusing(
                f"tools[{at}]",
                must='be an object of "type" "function" with a "function" that has a "name"',
                found=shown(tool),
            )
    return {name: value for name, value in members.items() if name != "tools"}


def _is_tool(tool: object) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "function" and _is_function(tool.get("function"))


def _is_function(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)
