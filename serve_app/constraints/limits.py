"""Bounds on what one constraint may cost and on its shortest text, and the refusal of a constraint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLParserLimits

from serve_app.core.errors import InvalidRequest
from serve_app.core.request import Constraint, ConstraintKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintLimits:
    """Bounds of what compiling constraints may cost: a tenant writes them, so all that they cost is bounded.

    max_cpu_s:       processor time of one trial, after which its process is ended by the kernel
    max_wall_s:      the same on the clock, where others have the processors
    slow_after_s:    after so long a trial runs at lower priority than the engine
    max_trial_bytes: memory of one trial beside the vocabulary
    max_trials:      at once, of those that have not run for long
    quick_s:         after so long a trial gives its place to others and takes one of the slow
    max_slow:        of these; where all are taken, a trial is ended after `quick_s` and its sender told to come again
    max_wait_s:      for a place; who waits longer is told to come again
    max_waiting:     constraints that wait for a place; more are refused
    max_cached, max_cached_chars: compiled constraints that are kept for later, and the length of their sources together
    """

    max_cpu_s: float = 1.0
    max_wall_s: float = 1.4
    slow_after_s: float = 0.05
    max_trial_bytes: int = 1 << 30
    max_trials: int = 4
    quick_s: float = 0.3
    max_slow: int = 4
    max_wait_s: float = 5.0
    max_waiting: int = 256
    max_cached: int = 256
    max_cached_chars: int = 4_000_000


DEFAULT_LIMITS = ConstraintLimits()
MAX_SHORTEST_CHARS = 65_536
"""Characters of the shortest text that satisfies a constraint; no model would write a longer one to its end."""


def parser_limits(*, has_rules: bool = False) -> LLParserLimits:
    """Return what the library itself bounds: the grammar's size, the lexer's states, the work for one mask.

    A quarter of its own limits or less, as many sequences share a step. What a mask may cost by these is some
    milliseconds; what people write stays far below.

    has_rules: that a client wrote. They may be ambiguous, and the work for a token of such a grammar grows with the
               cube of the items in a row. A schema is not, and its widest object has four items for each property that
               may be left out, which cost next to nothing.
    """
    return LLParserLimits(
        max_items_in_row=300 if has_rules else 2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=2_000 if has_rules else 10_000,
        max_lexer_states=25_000,
        max_grammar_size=250_000,
        verbose_errors=False,
    )


LANGUAGES: Mapping[ConstraintKind, str] = {
    "json_schema": "a JSON schema",
    "compact_json": "a JSON schema",
    "choice": "a list of texts",
    "gbnf": "a grammar in GBNF",
    "regex": "a regular expression",
    "lark": "a grammar in Lark",
    "llguidance": "a grammar of llguidance",
    "structural_tag": "a structural tag",
    "tools": "JSON schemas of arguments",
}


class Refusal(Exception):
    """What is wrong with a source, in a clause that stands behind a colon.

    path: where in a schema, as a JSON pointer; "" is nowhere in particular
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)
        self.message = message
        self.path = path

    def of(self, constraint: Constraint) -> InvalidRequest:
        """Return the refusal for the client that sent this constraint."""
        where = f" at {self.path}" if self.path else ""
        must = f"hold {LANGUAGES[constraint.kind]} that can be followed"
        return InvalidRequest.refusing(constraint.name, must=must, found=f"this{where}: {self.message}")


def child(path: str, *steps: str | int) -> str:
    """Return the pointer of a part of what `path` points to."""
    return "/".join((path, *(str(step).replace("~", "~0").replace("/", "~1") for step in steps)))


def check_length(num_chars: int, path: str = "") -> int:
    """Raise Refusal if the shortest text has more characters than may be."""
    if num_chars > MAX_SHORTEST_CHARS:
        least = f"{num_chars}" if num_chars < MOST else f"{MOST} or more"
        raise Refusal(f"its shortest text has {least} characters, and {MAX_SHORTEST_CHARS} are allowed", path)
    return num_chars


def check_schema(schema: Any, definitions: Mapping[str, Any], paths: Mapping[str, str]) -> None:
    """Raise Refusal, which names the part, if the shortest JSON of a prepared schema is too long.

    definitions, paths: what `$ref` leads to, and where that stood in what was sent
    """
    _Schemas(definitions, paths).shortest(schema, "#")


class _Schemas:
    """Checks each part of a schema by itself, also options that need not be taken."""

    def __init__(self, definitions: Mapping[str, Any], paths: Mapping[str, str]) -> None:
        self._definitions = definitions
        self._paths = paths
        self._known: dict[str, int] = {}

    def shortest(self, schema: Any, path: str) -> int:
        """Return the characters of the shortest JSON, or fewer if that is not plain."""
        if not isinstance(schema, dict):
            return 1
        found = [1, self._of_types(schema, path)]
        if "const" in schema:
            found.append(_written(schema["const"]))
        if "enum" in schema:
            found.append(min(map(_written, schema["enum"])))
        if "$ref" in schema:
            found.append(self._referred(schema["$ref"]))
        for name, choose in (("anyOf", min), ("oneOf", min), ("allOf", max)):
            if name in schema:
                options = enumerate(schema[name])
                found.append(choose(self.shortest(each, child(path, name, at)) for at, each in options))
        return check_length(max(found), path)

    def _referred(self, reference: str) -> int:
        name = reference.rpartition("/")[2]
        if name not in self._definitions:
            return 1  # the root, within itself
        if name not in self._known:
            self._known[name] = 1  # what it is within itself
            self._known[name] = self.shortest(self._definitions[name], self._paths[name])
        return self._known[name]

    def _of_types(self, schema: dict[str, Any], path: str) -> int:
        types = schema.get("type")
        lengths = {
            "string": 2 + max(int(schema.get("minLength", 0)), shortest_match(schema.get("pattern", ""))),
            "array": self._of_array(schema, path),
            "object": self._of_object(schema, path),
        }
        wanted = types if isinstance(types, list) else [types]
        return min(lengths.get(str(each), 1) for each in wanted)

    def _of_array(self, schema: dict[str, Any], path: str) -> int:
        least = int(schema.get("minItems", 0))
        first = [
            self.shortest(each, child(path, "prefixItems", at)) for at, each in enumerate(schema.get("prefixItems", ()))
        ]
        each = self.shortest(schema.get("items"), child(path, "items"))
        return min(2 + sum(first[:least]) + max(least - len(first), 0) * each + max(least - 1, 0), MOST)

    def _of_object(self, schema: dict[str, Any], path: str) -> int:
        names = dict.fromkeys(schema.get("required", ()))
        parts = {
            name: self.shortest(each, child(path, "properties", name))
            for name, each in schema.get("properties", {}).items()
        }
        for name, each in schema.get("patternProperties", {}).items():
            self.shortest(each, child(path, "patternProperties", name))
        self.shortest(schema.get("additionalProperties"), child(path, "additionalProperties"))
        return min(1 + sum(_written(name) + 2 + parts.get(name, 1) for name in names) + (not names), MOST)


def _written(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


MOST = 10**12
"""Counts go no further."""
TOKEN = re.compile(
    r"""(?P<nothing>\^|\$|\\[bBAzZ]|\(\?[a-zA-Z-]*\))
    |(?P<opens>\((?:\?(?:P?<\w+>|[a-zA-Z-]*:))?)
    |(?P<closes>\))
    |(?P<or>\|)
    |(?P<count>(?:[*+?]|\{\s*\d+\s*(?:,\s*(?:\d+\s*)?)?\})\??)
    |(?P<one>\\[pPxuU]\{[^}]*\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\.
        |\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]
        |.)""",
    re.VERBOSE | re.DOTALL,
)
FIRST_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class _Group:
    """One that is still open. ended: the lengths of its options before the last `|`; parts: of what follows that"""

    ended: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    def end_option(self) -> None:
        self.ended.append(min(sum(self.parts), MOST))
        self.parts = []

    def shortest(self) -> int:
        self.end_option()
        return min(self.ended)


def shortest_match(regex: str) -> int:
    """Return the characters of a regular expression's shortest text, at most `MOST`; 0 if parentheses do not match."""
    groups = [_Group()]
    for token in TOKEN.finditer(regex):
        match token.lastgroup:
            case "opens":
                groups.append(_Group())
            case "closes" if len(groups) == 1:
                return 0
            case "closes":
                length = groups.pop().shortest()
                groups[-1].parts.append(length)
            case "or":
                groups[-1].end_option()
            case "count" if groups[-1].parts:
                groups[-1].parts[-1] = min(groups[-1].parts[-1] * _least(token.group()), MOST)
            case "nothing":
                groups[-1].parts.append(0)
            case "one":
                groups[-1].parts.append(1)
    return groups[0].shortest() if len(groups) == 1 else 0


def _least(count: str) -> int:
    """Return how often a count repeats at least; only its last 20 digits are read."""
    number = FIRST_NUMBER.search(count)
    if number is None:
        return int(count.startswith("+"))
    return min(int(number.group()[-20:]), MOST)
