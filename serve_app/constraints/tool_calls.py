"""Calls of tools as a grammar: a text that has to be calls, or one in which what begins as a call is one.

{"is_required", "trigger", "opening", "closing", "separator", "calls": [{"begin", "schema", "end", "at"}],
 "beside": null or {"kind", "source", "name"}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from serve_app.constraints.lark import quoted
from serve_app.constraints.refusal import Refusal
from serve_app.constraints.structural_tag import ANY_TEXT, Writer

NO_CALL = r'/(?s:.*)/ & ~/(?s:[ \t\r\n]*(\[[ \t\r\n]*)?\{[ \t\r\n]*"name".*)/'
"""Text that does not begin as a call does."""

Special = Mapping[str, int]
"""Special tokens by their names."""


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


def _start(job: dict[str, Any], writer: Writer, special: Special) -> str:
    trigger = job["trigger"]
    if job["is_required"]:
        return _calls(job, writer, special, job["opening"])
    if job["beside"] is not None:
        return f"{_calls(job, writer, special, job['opening'])} | {_beside(job['beside'], writer)}"
    if not trigger:
        writer.lines.append(f"NO_CALL: {NO_CALL}")  # only terminals can be what something else is not
        return f"{_calls(job, writer, special, job['opening'])} | NO_CALL"
    calls = _calls(job, writer, special, job["opening"].removeprefix(trigger))
    free = writer.define(ANY_TEXT)
    head = writer.define(f"{ANY_TEXT} {_literal(trigger, special)}", is_lazy=trigger not in special)
    return f"({head} {calls})* {free}" if job["separator"] else f"{head} {calls} | {free}"


def _calls(job: dict[str, Any], writer: Writer, special: Special, opening: str) -> str:
    """One call, or several where there is a separator."""
    options = []
    for call in job["calls"]:
        schema = writer.format({"type": "json_schema", "json_schema": call["schema"]}, _path(call), follows=None)
        options.append(" ".join((_literal(call["begin"], special), schema, _literal(call["end"], special))))
    one = writer.define(" | ".join(options))
    more = f"({_literal(job['separator'], special)} {one})*" if job["separator"] else ""
    return writer.define(f"{_literal(opening, special)} {one} {more} {_literal(job['closing'], special)}")


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


def _literal(text: str, special: Special) -> str:
    """A text, with tokens where it names special ones."""
    names = [name for name in special if name and name in text]
    if not names:
        return quoted(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")", text)
    return " ".join(f"<[{special[part]}]>" if part in special else quoted(part) for part in parts if part)
