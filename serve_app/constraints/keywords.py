"""The keywords of JSON Schema: what each must hold, which cannot be enforced, what `$ref` means, and known patterns.

Nothing is ever fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from serve_app.constraints.limits import Refusal, child

FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
"""Enforced; others are annotations, as the standard has it."""

Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


MOST_EXACT = 2**63
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
TYPE_NAMES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))

SHAPES: Mapping[str, tuple[Check, str]] = {
    "type": (
        lambda value: bool(value) and set(value if isinstance(value, list) else [str(value)]) <= TYPE_NAMES,
        f"one of {', '.join(sorted(TYPE_NAMES))}, or a list of them",
    ),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "const": (lambda value: True, "a value"),
    "required": (_are_texts, "a list of names"),
    "pattern": (_is_text, "a string"),
    "format": (_is_text, "a string"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("minimum", "maximum"), (_is_number, "a number")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (_is_number, "a number, or a boolean")),
    **dict.fromkeys(COUNTS, (_is_count, "a whole number of at least 0")),
}
"""Keywords that hold no schemas, by what they must hold."""

SCHEMA_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
SCHEMA_MAPS = ("properties", "patternProperties")


def _is_nothing(value: Any) -> bool:
    return not value


def _is_anything(value: Any) -> bool:
    return value is True or value == {}


UNENFORCED: Mapping[str, Check] = {
    "contains": lambda value: False,
    "if": lambda value: True,  # counts for nothing without the two that follow
    "then": _is_anything,
    "else": _is_anything,
    "dependentRequired": _is_nothing,
    "dependentSchemas": _is_nothing,
    "dependencies": _is_nothing,
    "unevaluatedItems": _is_anything,
    "$dynamicRef": lambda value: False,
    "x-guidance": lambda value: False,  # would change the rules of the library itself
}
"""Keywords that cannot be enforced, by which of their values change nothing."""


def check_shape(name: str, value: Any, path: str) -> None:
    """Raise Refusal if a keyword does not hold what it must."""
    is_right, words = SHAPES[name]
    if not is_right(value):
        raise Refusal(f'"{name}" must be {words}', path)
    if not _is_exact(value):
        raise Refusal(f'"{name}" cannot be enforced with an integer of 2^63 or more', path)


def _is_exact(value: Any) -> bool:
    """Return whether the library reads every integer exactly; it reads longer ones as the nearest float."""
    match value:
        case bool():
            return True
        case int():
            return -MOST_EXACT <= value < MOST_EXACT
        case list():
            return all(map(_is_exact, value))
        case dict():
            return all(map(_is_exact, value.values()))
        case _:
            return True


def check_enforced(schema: Mapping[str, Any], path: str) -> None:
    """Raise Refusal if a keyword would have to be enforced and cannot be."""
    for name, changes_nothing in UNENFORCED.items():
        if name in schema and not changes_nothing(schema[name]):
            if name == "contains" and schema.get("minContains") == 0 and "maxContains" not in schema:
                continue
            raise unenforced(name, path)


def unenforced(name: str, path: str, when: str = "") -> Refusal:
    return Refusal(f'"{name}"{when} cannot be enforced', path)


_LOCAL = r"[A-Za-z0-9_'+\-]"

KNOWN: Mapping[str, str] = {
    # pydantic, of a Decimal: at least one digit, around at most one point
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    # zod 4, of z.email(): no point first, none beside another
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        rf"^({_LOCAL}+\.)*{_LOCAL}*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{{2,}}$"
    ),
    # zod 3, of z.string().email()
    r"^(?!\.)(?!.*\.\.)([A-Z0-9_'+\-\.]*)[A-Z0-9_+-]@([A-Z0-9][A-Z0-9\-]*\.)+[A-Z]{2,}$": (
        r"^([A-Z0-9_'+\-]+\.)*[A-Z0-9_'+\-]*[A-Z0-9_+\-]@([A-Z0-9][A-Z0-9\-]*\.)+[A-Z]{2,}$"
    ),
    # zod 4, of z.iso.duration(): weeks alone, or a part of a date or a time at least
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)(T{time})?|T{time})$".replace(
            "{time}", r"(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S)"
        )
    ),
}


ROOT = "#"


class References:
    """The parts of one schema by what they may be called: pointers, anchors, ids."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._base = root.get("$id", "") if isinstance(root, dict) and isinstance(root.get("$id", ""), str) else ""
        self._named: dict[str, str] | None = None

    def path_of(self, reference: object, path: str) -> str:
        """Return the pointer of what a reference at `path` means. Raises Refusal."""
        if not isinstance(reference, str):
            raise Refusal('"$ref" must be a string', path)
        target = urljoin(self._base, reference) if self._base else reference
        address, fragment = urldefrag(target)
        if address.rstrip("#") in ("", self._base.rstrip("#")) and (not fragment or fragment.startswith("/")):
            return ROOT + unquote(fragment).rstrip("/")
        if self._named is None:
            self._named = dict(self._names())
        found = self._named.get(target) or self._named.get(reference)
        if found is None:
            raise Refusal(
                f'"$ref" is {reference[:100]!r}, which is not within the schema, and nothing is fetched', path
            )
        return found

    def at(self, target: str, path: str) -> Any:
        """Return what a pointer leads to. Raises Refusal if it leads nowhere; `path` is where the pointer stands."""
        found = self._root
        for step in target.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise Refusal(f'"$ref" is {target[:100]!r}, where the schema has nothing', path)
        return found

    def _names(self) -> Iterator[tuple[str, str]]:
        open_parts: list[tuple[str, Any]] = [(ROOT, self._root)]
        while open_parts:
            path, part = open_parts.pop()
            if isinstance(part, dict):
                if isinstance(anchor := part.get("$anchor"), str):
                    yield urljoin(self._base, f"#{anchor}"), path
                if isinstance(name := part.get("$id"), str):
                    yield urljoin(self._base, name), path
                open_parts += [(child(path, key), value) for key, value in part.items()]
            elif isinstance(part, list):
                open_parts += [(child(path, at), value) for at, value in enumerate(part)]
