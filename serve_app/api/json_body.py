"""Reads a request's body into a JSON object, refusing what JSON does not have or a server should not take."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from serve_app.api.dialects import UNION
from serve_app.api.error_text import shown
from serve_app.api.forms.form import Parameter, Terms, Value
from serve_app.api.limits import WireLimits
from serve_app.core.errors import InvalidRequest, MalformedJson, UnsupportedParameter

SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json_object(body: bytes, *, max_depth: int) -> dict[str, object]:
    """Parse strict JSON: UTF-8, finite numbers, no key twice, no lone surrogates, bounded depth.

    Raises InvalidRequest; MalformedJson where it is the syntax that is wrong.
    """
    text = _decode(body)
    value = _parse(text)
    if not isinstance(value, dict):
        raise InvalidRequest(f"The request body must be a JSON object; found {shown(value)}.")
    check_depth(value, max_depth)
    if SURROGATE_ESCAPE.search(text):
        _check_characters(value)
    return value


def _decode(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedJson(f"The request body must be JSON in UTF-8; byte {error.start} is not UTF-8.") from None


def _parse(text: str) -> object:
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_unique_members)
    except json.JSONDecodeError as error:
        raise MalformedJson(
            f"The request body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}."
        ) from None
    except RecursionError:
        raise MalformedJson("The request body is nested too deeply.") from None
    except ValueError:  # Python refuses integers of more than 4300 digits
        raise MalformedJson("The request body contains an integer of thousands of digits.") from None


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise MalformedJson(f"The request body contains {literal[:40]}, which no finite number can hold.")
    return number


def _refuse_constant(literal: str) -> NoReturn:
    raise MalformedJson(f"The request body contains {literal}, which is not JSON; numbers must be finite.")


def _unique_members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidRequest(f"The request body has the key {shown(twice)} more than once in one object.")
    return members


def check_depth(value: object, max_depth: int) -> None:
    """Raises InvalidRequest where containers stand within more containers than that."""
    level = [value]
    for _ in range(max_depth):
        level = [child for container in level for child in _containers(container)]
        if not level:
            return
    raise InvalidRequest(f"The request body is nested more than {max_depth} levels deep.")


def _containers(container: object) -> list[object]:
    if isinstance(container, dict):
        return [child for child in container.values() if isinstance(child, list | dict)]
    if isinstance(container, list):
        return [child for child in container if isinstance(child, list | dict)]
    return []


def _check_characters(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            "The request body contains half of a surrogate pair (\\ud800 to \\udfff), which is no character."
        ) from None


def read_members(
    body: bytes, table: Mapping[str, Parameter], limits: WireLimits, *, path: str, required: str | None = None
) -> dict[str, Any]:
    """The members that are not null, in their forms.

    required: a member that must be there

    Raises InvalidRequest, and UnsupportedParameter for a name that the table lacks.
    """
    terms = Terms(limits=limits, dialect=UNION)
    values = {}
    for name, sent in read_json_object(body, max_depth=limits.max_depth).items():
        if sent is None:
            continue
        if name not in table:
            raise UnsupportedParameter.refusing(
                name[:100], must=f"be one of the parameters of {path}: {', '.join(table)}", found="none of that name"
            )
        values[name] = table[name].form.read(Value(name=name, sent=sent, terms=terms))
    if required is not None and required not in values:
        raise InvalidRequest.refusing(required, must=f"be {table[required].form.words(terms)}", found="nothing")
    return values
