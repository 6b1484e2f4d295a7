"""Calls of tools as a grammar: a text that has to be calls, or one in which what begins as a call is one.

{"is_required", "trigger", "opening", "closing", "separator",
 "calls": [{"begin", "schema", "is_strict", "end", "at", "marks": null or {"key", "value", "end"}}],
 "beside": null or {"kind", "source", "name"}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from serve_app.constraints.marked_arguments import MarkedArguments, Special, literal
from serve_app.constraints.refusal import Refusal
from serve_app.constraints.structural_tag import ANY_TEXT, Writer

ANY_OBJECT = {"type": "object"}
NO_CALL = r'/(?s:.*)/ & ~/(?s:[ \t\r\n]*(\[[ \t\r\n]*)?\{[ \t\r\n]*"name".*)/'
"""Text that does not begin as a call does."""


def tool_calls_to_lark(source: str, special: Special) -> tuple[str, tuple[str, ...]]:
    """The grammar, and the formats in its schemas that nobody enforces. Raises Refusal, which says where.

    What is written around calls becomes special tokens where the model has them by that name.
    """
    job = json.loads(source)
    writer = Writer()
    start = _start(job, writer, special)
    return "\n".join((f"start: {start}", *writer.lines)), tuple(writer.formats)


def schemas_in(source: str) -> list[tuple[str, str]]:
    """Every schema with its path, as it is told to who sent it."""
    return [(_path(call), json.dumps(call["schema"])) for call in json.loads(source)["calls"]]


def relaxed(source: str) -> str | None:
    """The same with any object for the arguments of tools that are not strict; None where it is the same already."""
    job = json.loads(source)
    calls = [call if call["is_strict"] else {**call, "schema": ANY_OBJECT} for call in job["calls"]]
    return None if calls == job["calls"] else json.dumps({**job, "calls": calls})


def _start(job: dict[str, Any], writer: Writer, special: Special) -> str:
    trigger = job["trigger"]
    if job["is_required"]:
        return _calls(job, writer, special, job["opening"])
    if job["beside"] is not None:
        return f"{_calls(job, writer, special, job['opening'])} | {_beside(job['beside'], writer)}"
    if not trigger:
        writer.lines.append(f"NO_CALL: {NO_CALL}")  # only terminals can be what something else is not
        return f"{_calls(job, writer, special, job['opening'])} | NO_CALL"
    trigger = next((name for name in special if name and name in trigger), trigger)
    calls = _calls(job, writer, special, job["opening"].partition(trigger)[2])
    free = writer.define(ANY_TEXT)
    head = writer.define(f"{ANY_TEXT} {literal(trigger, special)}", is_lazy=trigger not in special)
    others = sorted(token_id for name, token_id in special.items() if name != trigger)
    besides = f"{free} <[{','.join(map(str, others))}]>" if others else free  # thoughts stand between such tokens
    if job["separator"] is not None:
        return f"({writer.define(f'{besides} | {head} {calls}')})* {free}"
    return f"({writer.define(besides)})* ({head} {calls} | {free})" if others else f"{head} {calls} | {free}"


def _calls(job: dict[str, Any], writer: Writer, special: Special, opening: str) -> str:
    """One call, or several where there is a separator."""
    options = []
    for call in job["calls"]:
        options.append(
            " ".join(
                (
                    literal(call["begin"], special),
                    _arguments(call, writer, special),
                    literal(call["end"], special),
                )
            )
        )
    one = writer.define(" | ".join(options))
    more = f"({literal(job['separator'], special)} {one})*" if job["separator"] is not None else ""
    return writer.define(f"{literal(opening, special)} {one} {more} {literal(job['closing'], special)}")


def _arguments(call: Mapping[str, Any], writer: Writer, special: Special) -> str:
    if call["marks"] is None:
        return writer.format({"type": "json_schema", "json_schema": call["schema"]}, _path(call), follows=None)
    return MarkedArguments(call["schema"], _path(call), call["marks"], writer=writer, special=special).symbol()


def _path(call: Mapping[str, Any]) -> str:
    return f"#/{call['at']}/function/parameters"


def _beside(other: dict[str, str], writer: Writer) -> str:
    """What the text may be instead. Raises Refusal, which names where that came from."""
    match other["kind"]:
        case "json_schema":
            part: dict[str, Any] = {"type": "json_schema", "json_schema": json.loads(other["source"])}
        case "regex":
            part = {"type": "regex", "pattern": other["source"]}
        case _:
            part = {"type": "grammar", "grammar": other["source"]}
    try:
        return writer.format(part, "#", follows=None)
    except Refusal as refusal:
        raise Refusal(refusal.message, f"{other['name']} {refusal.path}") from None
