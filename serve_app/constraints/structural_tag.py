"""Writes structural tags and tool calls as grammars: free text, and forms that begin where a trigger is written.

The forms are those that SGLang and xgrammar document; `llguidance.StructTag` knows only the older one.

{"structures": [{"begin": "<f=a>", "schema": {…}, "end": "</f>"}], "triggers": ["<f="]}
{"format": {"type": "triggered_tags", "triggers": […], "tags": [{"begin", "content", "end"}]}}

Of tool calls, a text that must be calls, or one in which whatever begins as a call is one:

{"is_required", "trigger", "opening", "closing", "separator",
 "calls": [{"begin", "schema", "is_strict", "end", "at", "marks": null or {"key", "value", "end"}}],
 "beside": null or {"kind", "source", "name"}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.constraints.gbnf import quoted, read_gbnf, to_lark
from serve_app.constraints.json_schema import prepare_schema
from serve_app.constraints.keywords import KNOWN, SHAPES, References, check_enforced, check_shape, unenforced
from serve_app.constraints.limits import Refusal, check_length, child, shortest_match

ANY_TEXT = "/(?s:.*)/"
MAX_PARTS = 1000


def structural_tag_to_lark(source: str) -> tuple[str, tuple[str, ...]]:
    """Return the grammar, and the formats in its schemas that are not enforced. Raises Refusal, which says where."""
    tag = json.loads(source)
    writer = Writer()
    if "format" in tag:
        start = writer.format(tag["format"], "#/format", follows=None)
    else:
        start = writer.triggered(_as_triggered(tag), "#")
    lines = [f"start: {start}", *writer.lines]
    return "\n".join(lines), tuple(writer.formats)


def _as_triggered(tag: dict[str, Any]) -> dict[str, Any]:
    """Return the older form as the newer one."""
    structures = tag.get("structures")
    if not isinstance(structures, list) or not all(isinstance(each, dict) for each in structures):
        raise Refusal('a structural tag has a "format", or "structures" and "triggers"')
    tags = [
        {
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", True)},
            "end": each.get("end"),
        }
        for each in structures
    ]
    return {"triggers": tag.get("triggers"), "tags": tags}


class Writer:
    """Writes one rule per part. Free text up to an end mark is one lexeme with the mark, and ends at the first one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.formats: dict[str, None] = {}
        self._num_parts = 0

    def format(self, part: Any, path: str, *, follows: str | None) -> str:
        """Return the symbol of a part.

        follows: the literal behind it, which the part takes in because it has no end of its own
        """
        kind = part.get("type") if isinstance(part, dict) else None
        match kind:
            case "const_string":
                body = quoted(_text(part, "value", path))
            case "json_schema":
                body = self.schema(part.get("json_schema", True), path)
            case "regex":
                regex = _text(part, "pattern", path)
                check_length(shortest_match(regex), path)
                body = lark_regex(regex)
            case "grammar":
                body = self._grammar(_text(part, "grammar", path))
            case "any_text":
                return self._any_text(part, path, follows)
            case "sequence":
                body = " ".join(self._sequence(_parts(part, "elements", path), path, follows))
            case "or":
                options = _parts(part, "elements", path)
                body = " | ".join(
                    self.format(each, child(path, "elements", at), follows=None) for at, each in enumerate(options)
                )
            case "tag":
                body = self._tag(part, path)
            case "triggered_tags":
                return self.triggered(part, path)
            case "tags_with_separator":
                body = self._separated(part, path)
            case _:
                what = f'"type" is {str(kind)[:60]!r}, which is no format of a structural tag that can be enforced'
                raise Refusal(what, path)
        return self.define(body)

    def triggered(self, part: dict[str, Any], path: str) -> str:
        """Return free text in which each trigger begins one of the tags that begin with it."""
        triggers = [each for each in _parts(part, "triggers", path) if isinstance(each, str) and each]
        tags = _parts(part, "tags", path)
        if len(triggers) != len(part["triggers"]):
            raise Refusal('"triggers" must be non-empty strings', path)
        options = []
        for at, tag in enumerate(tags):
            where = child(path, "tags", at)
            begin = _text(tag, "begin", where)
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise Refusal('"begin" must begin with one of the "triggers"', where)
            head = self.define(f"{ANY_TEXT} {quoted(trigger)}", is_lazy=True)
            rest = quoted(begin[len(trigger) :]) if len(begin) > len(trigger) else ""
            options.append(f"{head} {rest} {self._content(tag, where)}")
        once = self.define(" | ".join(options))
        least = 1 if part.get("at_least_one") else 0
        if part.get("stop_after_first"):
            return self.define(once if least else f"{once} | {self.define(ANY_TEXT)}")
        return self.define(f"{once}{{{least},}} {self.define(ANY_TEXT)}")

    def _tag(self, part: Any, path: str) -> str:
        return f"{quoted(_text(part, 'begin', path))} {self._content(part, path)}"

    def _content(self, part: Any, path: str) -> str:
        """Return what stands between the beginning of a tag and the end of its end mark."""
        end = _text(part, "end", path)
        content, where = part.get("content"), child(path, "content")
        is_free = isinstance(content, dict) and content.get("type") == "any_text"
        symbol = self.format(content, where, follows=end if is_free else None)
        return symbol if is_free or not end else f"{symbol} {quoted(end)}"

    def _sequence(self, elements: list[Any], path: str, follows: str | None) -> list[str]:
        symbols = []
        for at, element in enumerate(elements):
            where, is_last = child(path, "elements", at), at + 1 == len(elements)
            if not is_last and isinstance(element, dict) and element.get("type") == "any_text":
                raise Refusal('"any_text" must be the last element, or stand in a tag with an "end"', where)
            symbols.append(self.format(element, where, follows=follows if is_last else None))
        return symbols

    def _separated(self, part: Any, path: str) -> str:
        separator = _text(part, "separator", path)
        tags = _parts(part, "tags", path)
        symbols = [self.define(self._tag(tag, child(path, "tags", at))) for at, tag in enumerate(tags)]
        one = self.define(" | ".join(symbols))
        more = "" if part.get("stop_after_first") else f" ({quoted(separator) if separator else ''} {one})*"
        return f"{one}{more}" if part.get("at_least_one") else f"({one}{more})?"

    def _any_text(self, part: Any, path: str, follows: str | None) -> str:
        if part.get("excludes"):
            raise Refusal('"excludes" cannot be enforced', path)
        if not follows:
            return self.define(ANY_TEXT)
        return self.define(f"{ANY_TEXT} {quoted(follows)}", is_lazy=True)

    def schema(self, schema: Any, path: str) -> str:
        """Return a schema as the body of a rule. Raises Refusal."""
        try:
            prepared = prepare_schema(json.dumps(schema))
        except Refusal as refusal:
            raise Refusal(refusal.message, path + refusal.path.removeprefix("#")) from None
        self.formats |= dict.fromkeys(prepared.formats)
        return f"%json {json.dumps(prepared.schema)}"

    def _grammar(self, text: str) -> str:
        symbol, lines = to_lark(read_gbnf(text), prefix=f"g{len(self.lines)}")
        self.lines += lines
        return symbol

    def define(self, body: str, *, is_lazy: bool = False) -> str:
        """Add a rule and return its symbol. Raises Refusal if there are too many."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise Refusal(f"the structural tag has more than {MAX_PARTS} parts")
        symbol = f"p{self._num_parts}"
        self.lines.append(f"{symbol}{'[lazy]' if is_lazy else ''}: {body}")
        return symbol


def _text(part: Any, name: str, path: str) -> str:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, str):
        raise Refusal(f'"{name}" must be a string', path)
    return value


def _parts(part: Any, name: str, path: str) -> list[Any]:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, list) or not value:
        raise Refusal(f'"{name}" must be a list that is not empty', path)
    return value


def lark_regex(regex: str) -> str:
    """Return a regular expression between Lark's slashes."""
    return "/" + regex.replace("/", "\\u{2f}").replace("\n", "\\n").replace("\r", "\\r") + "/"


Special = Mapping[str, int]
"""Special tokens by their names."""
ANY_OBJECT = {"type": "object"}
NO_CALL = r'/(?s:.*)/ & ~/(?s:[ \t\r\n]*(\[[ \t\r\n]*)?\{[ \t\r\n]*"name".*)/'
"""Text that does not begin as a call does."""


def tool_calls_to_lark(source: str, special: Special) -> tuple[str, tuple[str, ...]]:
    """Return the grammar, and the formats in its schemas that are not enforced. Raises Refusal, which says where.

    What is written around calls becomes special tokens where the model has them by that name.
    """
    job = json.loads(source)
    writer = Writer()
    start = _start(job, writer, special)
    return "\n".join((f"start: {start}", *writer.lines)), tuple(writer.formats)


def schemas_in(source: str) -> list[tuple[str, str]]:
    """Return every schema with its path, as its sender is told it."""
    return [(_path(call), json.dumps(call["schema"])) for call in json.loads(source)["calls"]]


def relaxed(source: str) -> str | None:
    """Return the source with any object as the arguments of tools that are not strict; None if nothing changes."""
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
    """Return one call, or several if there is a separator."""
    options = [
        f"{literal(call['begin'], special)} {_arguments(call, writer, special)} {literal(call['end'], special)}"
        for call in job["calls"]
    ]
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
    """Return what the text may be instead. Raises Refusal, which names where that came from."""
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


ALTERNATIVES = ("anyOf", "oneOf")
NOT_OF_STRINGS = ("allOf", "not")
NOT_OF_ARGUMENTS = (*NOT_OF_STRINGS, *ALTERNATIVES, "$ref", "patternProperties", "minProperties", "maxProperties")
"""Keywords that say something of strings, or of all arguments, and are not written into a grammar of these."""
ANY_KEY = r"""/[^<>"\r\n \t][^<>"\r\n]{0,99}/"""
LIKE_JSON = r"/[ \t\r\n]*([\-0-9\[{](?s:.*)|(true|false|null|True|False|None)[ \t\r\n]*)/"
"""Beside values of other types, a string that looks like one of these would be read as such."""


class MarkedArguments:
    """The arguments of one function, each between marks: strings as they are, all else as JSON.

    marks: what stands before a key, between it and its value, and behind that
    """

    def __init__(
        self, schema: Mapping[str, Any], path: str, marks: Mapping[str, str], *, writer: Writer, special: Special
    ) -> None:
        self._schema = schema
        self._path = path
        self._marks = marks
        self._writer = writer
        self._special = special
        self._references = References(schema)

    def symbol(self) -> str:
        """Return the symbol of all arguments, "" if there are none. Raises Refusal for what marks cannot hold."""
        schema, path = self._schema, self._path
        _check(schema, NOT_OF_ARGUMENTS, path)
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        missing = next((name for name in required if name not in properties), None)
        if missing is not None:
            raise Refusal(f'"required" names {missing[:60]!r}, which is none of the "properties"', path)
        if not properties and schema.get("additionalProperties") is not False:
            return f"{self._any_argument()}*"
        parts = [self._argument(name, part) + ("" if name in required else "?") for name, part in properties.items()]
        return " ".join(parts)

    def _any_argument(self) -> str:
        key = self._writer.define(ANY_KEY)
        before, between = literal(self._marks["key"], self._special), literal(self._marks["value"], self._special)
        return self._writer.define(f"{before} {key} {between} {self._ended('/(?s:.*)/')}")

    def _argument(self, name: str, schema: Any) -> str:
        path = child(self._path, "properties", name)
        if re.search(r"[<>\"\r\n]", name) or name != name.strip() or not name:
            raise Refusal("this name cannot stand between marks", path)
        head = literal(f"{self._marks['key']}{name}{self._marks['value']}", self._special)
        options = list(self._values(schema, path, is_alone=True))
        return self._writer.define(
            f"{head} ({' | '.join(options)})" if options else f"{head} {self._ended('/(?s:.*)/')}"
        )

    def _values(self, schema: Any, path: str, *, is_alone: bool) -> Iterator[str]:
        """Return every form of value that a schema allows, its end mark included.

        is_alone: whether the schema allows strings and nothing else
        """
        while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            target = self._references.path_of(schema["$ref"], path)
            schema, path = self._references.at(target, path), path
        if not isinstance(schema, Mapping):
            yield self._ended("/(?s:.*)/")
            return
        branches = _branches(schema)
        if branches:
            for branch in branches:
                yield from self._values(branch, path, is_alone=False)
        elif schema.get("type") == "string" or _is_of_strings(schema):
            yield self._string(schema, path, is_alone=is_alone)
        elif "type" in schema or "enum" in schema or "const" in schema:
            yield f"{self._json(schema, path)} {literal(self._marks['end'], self._special)}"
        else:
            yield self._ended("/(?s:.*)/")

    def _json(self, schema: Mapping[str, Any], path: str) -> str:
        shared = {name: self._schema[name] for name in ("$defs", "definitions") if name in self._schema}
        return self._writer.define(self._writer.schema({**shared, **schema}, path))

    def _string(self, schema: Mapping[str, Any], path: str, *, is_alone: bool) -> str:
        _check(schema, NOT_OF_STRINGS, path)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            end = self._marks["end"]
            texts = [
                value for value in values if isinstance(value, str) and end.rstrip() not in value + end.rstrip()[:-1]
            ]
            if not texts:
                raise Refusal("none of its values can stand between marks", path)
            return self._writer.define(" | ".join(literal(text + end, self._special) for text in texts))
        if schema.get("format") is not None:
            self._writer.formats[schema["format"]] = None
        low, high = check_length(int(schema.get("minLength", 0)), path), schema.get("maxLength", "")
        parts = ["/(?s:.*)/" if not low and high == "" else f"/(?s:.){{{low},{high}}}/"]
        if "pattern" in schema:
            parts.append(_searched(KNOWN.get(schema["pattern"], schema["pattern"])))
        return self._ended(" & ".join(parts if is_alone else [*parts, f"~{LIKE_JSON}"]))

    def _ended(self, terminal: str) -> str:
        """Return a text of this terminal up to the mark behind it, which the text does not contain."""
        end = self._marks["end"]
        mark = end.strip()
        inner = f"({terminal} & ~/(?s:.*){re.escape(mark).replace('/', chr(92) + '/')}(?s:.*)/)"
        if any(name and name in end for name in self._special):
            return f"{self._terminal(inner)} {literal(end, self._special)}"
        return self._terminal(f"{inner} {quoted(end)}")

    def _terminal(self, body: str) -> str:
        symbol = self._writer.define("").upper()
        self._writer.lines[-1] = f"{symbol}: {body}"
        return symbol


def literal(text: str, special: Special) -> str:
    """Return a text, with tokens in place of the names of special ones."""
    names = [name for name in special if name and name in text]
    if not names:
        return quoted(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")", text)
    return " ".join(f"<[{special[part]}]>" if part in special else quoted(part) for part in parts if part)


def _branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives that a schema names, one for each type; none if it names none."""
    for name in ALTERNATIVES:
        if isinstance(schema.get(name), list):
            rest = {key: value for key, value in schema.items() if key != name}
            return [{**rest, **part} for part in schema[name] if isinstance(part, Mapping)]
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": each} for each in schema["type"]]
    return []


def _is_of_strings(schema: Mapping[str, Any]) -> bool:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return "type" not in schema and bool(values) and all(isinstance(value, str) for value in values or ())


def _check(schema: Mapping[str, Any], unknown: tuple[str, ...], path: str) -> None:
    """Raise Refusal for a keyword that would have to be enforced and cannot be."""
    check_enforced(schema, path)
    for name, value in schema.items():
        if name in SHAPES:
            check_shape(name, value, path)
        if name in unknown:
            raise unenforced(name, path, " in the form in which this model writes calls")


def _searched(pattern: str) -> str:
    """Return an expression of whole texts that contain a match of the pattern."""
    head, tail = ("" if pattern.startswith("^") else "(?s:.*)"), ("" if pattern.endswith("$") else "(?s:.*)")
    return lark_regex(f"{head}({pattern.removeprefix('^').removesuffix('$')}){tail}")
