"""Reads what stands before and behind the arguments of a call, and turns untyped arguments into JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.core.tools import Tool
from serve_app.tools.forms import KEY, NAME, PARENTHESIS, Tokens, mark_of
from serve_app.tools.literals import LiteralReader, as_json

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
BESIDES = ("id", "type", "tool_call_id", "index")
"""Members of a call that say nothing of it."""
RESERVED = (*NAMES, *ARGUMENTS, *BESIDES, "function")
EVERY_TYPE = frozenset(("null", "boolean", "number", "string", "array", "object"))
STRING = frozenset(("string",))
MAX_REFERENCES = 16
JSON_TYPES: Mapping[type, str] = {
    type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"
}  # fmt: skip

_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"\w*")
_KEY = re.compile(r'[^<>"\r\n]*')
_ID = re.compile(r"[A-Za-z0-9_\-]*")
_KEYWORDS = re.compile(r"\(\s*(?:\)|[^\W\d]\w*\s*=)")
_KEYWORDS_BEGINNING = re.compile(r"\(\s*(?:[^\W\d]\w*\s*)?\Z")


class Incomplete(Exception):
    """The text ends before it can be told."""


class NoCall(Exception):
    """What is there is no call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A call up to its arguments.

    at:        of the arguments' first character, or behind what was read where they were whole
    arguments: that came before all else was known, or as a string; None: they begin at `at`
    num_open:  how many objects are still to be closed behind the arguments
    """

    name: str
    at: int
    arguments: str | None = None
    num_open: int = 0


def skip_space(text: str, at: int) -> int:
    """Return the place of the first character from there that is no white space of JSON."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def read_tokens(tokens: Tokens, text: str, at: int, *, words: Collection[str] | None, is_last: bool) -> tuple[str, int]:
    """Return the word that stands for NAME or KEY, and the place behind the tokens.

    words: that it may be; None is any word
    Raises Incomplete, NoCall.
    """
    if not tokens:
        return "", at
    token, rest = tokens[0], tokens[1:]
    at = skip_space(text, at)
    if token == NAME and words is not None:
        return _read_name(rest, text, at, words=words, is_last=is_last)
    if token == KEY:
        found = _KEY.match(text, at)
        assert found is not None
        _, end = read_tokens(rest, text, _whole(found, text, is_last=is_last), words=words, is_last=is_last)
        return found.group().strip(), end
    if token == PARENTHESIS:
        if not is_last and (at == len(text) or _KEYWORDS_BEGINNING.match(text, at)):
            raise Incomplete
        if not _KEYWORDS.match(text, at):
            raise NoCall
        return "", at
    mark = mark_of(token)
    if text.startswith(mark, at):
        end = at + len(mark)
        if token.endswith("*"):
            found = _ID.match(text, end)
            assert found is not None
            end = _whole(found, text, is_last=is_last)
        try:
            return read_tokens(rest, text, end, words=words, is_last=is_last)
        except NoCall:
            if token[0] not in "?~" or not mark:
                raise
    elif not is_last and mark.startswith(text[at:]):
        raise Incomplete
    elif token[0] not in "?~":
        raise NoCall
    return read_tokens(rest, text, at, words=words, is_last=is_last)


def _read_name(rest: Tokens, text: str, at: int, *, words: Collection[str], is_last: bool) -> tuple[str, int]:
    """Return the longest of the names that the rest can follow."""
    if not is_last and any(word.startswith(text[at:]) for word in words):
        raise Incomplete
    for word in sorted((word for word in words if text.startswith(word, at)), key=len, reverse=True):
        try:
            return word, read_tokens(rest, text, at + len(word), words=words, is_last=is_last)[1]
        except NoCall:
            continue
    raise NoCall


def _whole(found: re.Match[str], text: str, *, is_last: bool) -> int:
    """Return the end of what was found. Raises Incomplete if it may go on."""
    if found.end() == len(text) and not is_last:
        raise Incomplete
    return found.end()


def read_object_head(text: str, at: int, names: Collection[str], *, is_marked: bool) -> Head:
    """Read `{"name": …, "arguments": {…}}`, whose members may come in any order; `at` is at the brace.

    It may also stand in the member `function` of another object. Behind a mark it may be `{name: {…}}`, or may have
    no arguments.
    Raises Incomplete, NoCall: also for a name that is none of these.
    """
    members = _Members(text, at, names)
    while members.has_more():
        key = members.key()
        if members.peek() == "{":
            if key in ARGUMENTS and members.name is not None:
                return Head(name=members.name, at=members.at, num_open=1)
            if is_marked and key in names and members.is_first_of_all and key not in RESERVED:
                return Head(name=key, at=members.at, num_open=1)
            if key == "function" and members.name is None:
                inner = read_object_head(text, members.at, names, is_marked=True)
                return Head(name=inner.name, at=inner.at, arguments=inner.arguments, num_open=inner.num_open + 1)
        members.value(key)
    if members.name is None or (members.arguments is None and not is_marked):
        raise NoCall
    return Head(name=members.name, at=members.at, arguments=members.arguments or "{}")


def read_object_rest(text: str, at: int) -> int:
    """Return the place behind the object whose arguments ended before `at`. Raises Incomplete, NoCall."""
    members = _Members(text, at, (), is_inside=True)
    while members.has_more():
        key = members.key()
        if key not in BESIDES:
            raise NoCall
        members.value(key)
    return members.at


class _Members:
    """Walks the members of one object that may not be whole.

    is_inside: the walk begins behind a value
    """

    def __init__(self, text: str, at: int, names: Collection[str], *, is_inside: bool = False) -> None:
        self.at = at if is_inside else at + 1
        self.name: str | None = None
        self.arguments: str | None = None
        self._text = text
        self._names = names
        self._is_first = not is_inside
        self._seen: list[str] = []

    @property
    def is_first_of_all(self) -> bool:
        return len(self._seen) == 1

    def peek(self) -> str:
        """Return the next character that is not white space."""
        self.at = skip_space(self._text, self.at)
        if self.at == len(self._text):
            raise Incomplete
        return self._text[self.at]

    def has_more(self) -> bool:
        """Step over what stands between two members, and return False behind the last one."""
        if self.peek() == "," and not self._is_first:
            self.at += 1
        elif self.peek() != "}" and not self._is_first:
            raise NoCall
        self._is_first = False
        if self.peek() != "}":
            return True
        self.at += 1
        return False

    def key(self) -> str:
        if self.peek() in "\"'":
            key = str(json.loads(self._scanned()))
        else:
            found = _WORD.match(self._text, self.at)
            assert found is not None
            key, self.at = found.group(), _whole(found, self._text, is_last=False)
        if self.peek() != ":":
            raise NoCall
        self.at += 1
        kind = "arguments" if key in ARGUMENTS else "name" if key in NAMES else key
        if kind in self._seen:
            raise NoCall
        self._seen.append(kind)
        self.peek()
        return key

    def value(self, key: str) -> None:
        """Take the value of a member."""
        written = self._scanned()
        if key in NAMES or key == "function":
            self.name = json.loads(written)
            if not isinstance(self.name, str) or self.name not in self._names:
                raise NoCall
        elif key in ARGUMENTS:
            self.arguments = _as_object(json.loads(written), written)
        elif key not in BESIDES:
            raise NoCall

    def _scanned(self) -> str:
        reader = LiteralReader()
        self.at = reader.feed(self._text, self.at)
        if reader.state == "open":
            raise Incomplete
        if reader.state == "broken":
            raise NoCall
        return reader.take()


def _as_object(value: Any, written: str) -> str:
    """Return arguments as the JSON of an object; some models write them into a string, or null for none."""
    if isinstance(value, dict):
        return written
    if value is None:
        return "{}"
    found = as_json(value) if isinstance(value, str) and value.lstrip().startswith("{") else None
    if found is None:
        raise NoCall
    return found


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the text as JSON: the literal it is, if it may have that type; otherwise a string."""
    written = None if types == STRING else as_json(text)
    if written is None or _type_of(json.loads(written)) not in types:
        return json.dumps(text, ensure_ascii=False)
    return written


def types_of_arguments(tool: Tool) -> Mapping[str, frozenset[str]]:
    """Return the types that the arguments of a function may have; one that is not named may have any."""
    root = tool.parameters or {}
    properties = root.get("properties")
    named = properties if isinstance(properties, Mapping) else {}
    return {key: types_of(schema, root) for key, schema in named.items()}


def types_of(schema: Any, root: Mapping[str, Any], num_references: int = 0) -> frozenset[str]:
    """Return the types that a schema allows; integers are numbers, and what cannot be told is allowed."""
    if not isinstance(schema, Mapping) or num_references > MAX_REFERENCES:
        return EVERY_TYPE
    types = EVERY_TYPE
    said = schema.get("type")
    if said is not None:
        names = said if isinstance(said, list) else [said]
        types &= {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    if "const" in schema:
        types &= {_type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        types &= {_type_of(value) for value in schema["enum"]}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            parts = (types_of(part, root, num_references + 1) for part in schema[name])
            types &= frozenset[str]().union(*parts)
    if isinstance(schema.get("$ref"), str):
        types &= types_of(_target(schema["$ref"], root), root, num_references + 1)
    return types or EVERY_TYPE


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a pointer within the schema leads to; None if nothing."""
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    return JSON_TYPES.get(type(value), "object")
