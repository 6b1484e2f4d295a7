"""Finds keys that a pydantic model does not know, and values that it refuses, at any depth."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.runtime_env import RuntimeEnv

from serve_app.check.document import Finding, Path, Severity
from serve_app.deployments.arguments import GONE

PASSWORD = re.compile(r"://[^@/\s]*@")
"""Of a URL, with the user's name."""
PUBLIC_RUNTIME_ENV_KEYS = frozenset(name for name in RuntimeEnv.known_fields if not name.startswith("_"))


def unknown_keys(data: Any, schema: type[BaseModel], path: Path) -> Iterator[Finding]:
    """Find every key at or below `path` that no field of the schema has."""
    if not isinstance(data, dict):
        return  # the schema's own validation says what it should have been
    fields = schema.model_fields
    yield from _keys_outside(data, fields, path)
    for key, value in data.items():
        if key == "runtime_env" and isinstance(value, dict):
            yield from _keys_outside(value, PUBLIC_RUNTIME_ENV_KEYS, (*path, key))
        elif key in fields:
            for nested, nested_path, nested_schema in _nested(value, fields[key].annotation, (*path, key)):
                yield from unknown_keys(nested, nested_schema, nested_path)


def refused_values(data: Any, schema: type[BaseModel], path: Path) -> Iterator[Finding]:
    """Report what the schema's validation refuses, without unknown keys."""
    try:
        schema.model_validate(data)
    except ValidationError as error:
        seen = set()
        for detail in error.errors(include_url=False):
            if detail["type"] == "extra_forbidden":
                continue  # `unknown_keys` says it better
            finding = Finding(path=(*path, *_real_steps(data, detail["loc"])), message=_sentence(detail))
            if finding not in seen:
                seen.add(finding)
                yield finding


def refused_open_values(data: Any, schema: type[BaseModel], path: Path) -> Iterator[Finding]:
    """Check values of fields declared `dict | Model`, as pydantic takes any dict there."""
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        if key not in schema.model_fields:
            continue
        annotation = schema.model_fields[key].annotation
        for nested, nested_path, nested_schema in _nested(value, annotation, (*path, key)):
            if _is_open(annotation):
                yield from refused_values(nested, nested_schema, nested_path)
            yield from refused_open_values(nested, nested_schema, nested_path)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint for a message: the known word that was probably meant."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _keys_outside(data: dict[Any, Any], known: Iterable[str], path: Path) -> Iterator[Finding]:
    known = set(known)
    for key in data:
        if key in GONE and key not in known:
            yield Finding(path=(*path, str(key)), message=f"{key} {GONE[key]}", severity=Severity.WARNING)
        elif key not in known:
            told = nearest(str(key), known)
            yield Finding(path=(*path, str(key)), message=f"unknown key {str(key)!r}{told}")


def _nested(value: Any, annotation: Any, path: Path) -> Iterator[tuple[Any, Path, type[BaseModel]]]:
    """Find (value, path, schema) of every mapping below that the annotation describes by a model."""
    for alternative in _alternatives(annotation):
        if isinstance(alternative, type) and issubclass(alternative, BaseModel):
            if isinstance(value, dict):
                yield value, path, alternative
        elif get_origin(alternative) is list and isinstance(value, list):
            (item_annotation,) = get_args(alternative) or (Any,)
            for index, item in enumerate(value):
                yield from _nested(item, item_annotation, (*path, index))
        elif get_origin(alternative) is dict and isinstance(value, dict):
            _, item_annotation = get_args(alternative) or (Any, Any)
            for key, item in value.items():
                yield from _nested(item, item_annotation, (*path, str(key)))


def _alternatives(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _alternatives(argument)
    elif origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    else:
        yield annotation


def _is_open(annotation: Any) -> bool:
    """Return whether the annotation takes any dict beside the model it names, also inside a list."""
    alternatives = list(_alternatives(annotation))
    inside_lists = [item for each in alternatives if get_origin(each) is list for item in get_args(each)]
    return any(each is dict or get_origin(each) is dict for each in alternatives) or any(map(_is_open, inside_lists))


def _real_steps(data: Any, location: tuple[str | int, ...]) -> Path:
    """Return the part of pydantic's location that leads through the data, without union members and missing keys."""
    steps: list[str | int] = []
    for step in location:
        is_there = step in data if isinstance(data, dict) else isinstance(step, int) and isinstance(data, list)
        if is_there:
            data = data[step]
            steps.append(step)
    return tuple(steps)


def _sentence(detail: Any) -> str:
    if detail["type"] == "missing":
        return f"{detail['loc'][-1]!r} is required"
    message = str(detail["msg"]).removeprefix("Value error, ")
    value = detail.get("input")
    is_plain = isinstance(value, (str, int, float, bool)) or value is None
    found = PASSWORD.sub("://***@", repr(value))
    return f"{message}, found {found}" if is_plain else message
