"""Writes structural tags as a grammar: free text, and forms that begin where a trigger is written.

The forms are those that SGLang and xgrammar document; `llguidance.StructTag` knows only the older one.

{"structures": [{"begin": "<f=a>", "schema": {…}, "end": "</f>"}], "triggers": ["<f="]}
{"format": {"type": "triggered_tags", "triggers": […], "tags": [{"begin", "content", "end"}]}}
"""

from __future__ import annotations

import json
from typing import Any

from serve_app.constraints.gbnf import quoted, read_gbnf, to_lark
from serve_app.constraints.json_schema import prepare_schema
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
    """Writes one rule per part. A text that ends where something is written takes that into its own lexeme, and ends
    at the first."""

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
