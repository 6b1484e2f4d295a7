"""Whether the library may say which tokens are forced.

Where a constraint leaves one text, the library looks at all of it to say which token comes first, at every token: of a
text of fifty thousand characters that takes a tenth of a second each time. So it is asked only of schemas in which no
such text is long; elsewhere every token that begins what is left is allowed, and a mask costs what any other does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import prod
from typing import Any

MAX_LITERAL_CHARS = 512
"""Of a name, a constant, or one of a few."""
MAX_REPEATED = 64
"""Times that a pattern, or a least length, repeats a part."""
WITHOUT = '%llguidance {"no_forcing": true}'
"""Of several such lines the last one counts."""
COUNT = re.compile(r"\{(\d+)(?:,\d*)?\}")


def forces_little(schema: Any, *, is_compact: bool) -> bool:
    """Whether every text that a prepared schema forces is short.

    is_compact: there is no white space that would end such a text, so that parts of it follow each other
    """
    if is_compact and (len(json.dumps(schema)) > 4 * MAX_LITERAL_CHARS or _most(schema, "minItems") > 1):
        return False
    repeated = max(map(_repeated, _patterns(schema)), default=1)
    is_repeated = repeated > MAX_REPEATED or (_most(schema, "minLength") > MAX_REPEATED and any(_patterns(schema)))
    return not is_repeated and all(len(each) <= MAX_LITERAL_CHARS for each in _texts(schema))


def without_forcing(text: str) -> str:
    """The same grammar, in Lark or in the library's own JSON, whose forced tokens the library does not look for."""
    if not text.lstrip().startswith("{"):
        return f"{text}\n{WITHOUT}"
    try:
        members = json.loads(text)
        grammars = [_unforced(each) for each in members["grammars"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return text  # the library will say what is wrong with it
    return json.dumps({**members, "grammars": grammars})


def _unforced(grammar: dict[str, Any]) -> dict[str, Any]:
    """A schema is written within a grammar, which alone has such a line."""
    if grammar.get("json_schema") is not None:
        source = f"start: %json {json.dumps(grammar['json_schema'])}"
        return {**grammar, "json_schema": None, "lark_grammar": f"{source}\n{WITHOUT}"}
    return {**grammar, "lark_grammar": f"{grammar['lark_grammar']}\n{WITHOUT}"}


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Every member of every object in it."""
    match value:
        case dict():
            for name, each in value.items():
                yield name, each
                yield from _members(each)
        case list():
            for each in value:
                yield from _members(each)


def _texts(schema: Any) -> Iterator[str]:
    for name, value in _members(schema):
        yield name
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str):
                yield each


def _patterns(schema: Any) -> Iterator[str]:
    for name, value in _members(schema):
        if name == "pattern" and isinstance(value, str):
            yield value
        if name == "patternProperties" and isinstance(value, dict):
            yield from value


def _repeated(pattern: str) -> int:
    """Times that a part of it is repeated, at most; counts of groups within groups multiply."""
    counts = [int(each) for each in COUNT.findall(pattern)]
    return prod(counts) if "){" in pattern else max(counts, default=1)


def _most(schema: Any, keyword: str) -> float:
    return max((value for name, value in _members(schema) if name == keyword and isinstance(value, int)), default=0)
