"""Tenants as they are written down, in JSON and in tenants.yaml, and every rule of what one may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any, get_args

from serve_app.core.shares import Priority
from serve_app.core.tenants import BUDGETS, LEAST_BUDGET, LEAST_WEIGHT, MOST_BUDGET, MOST_WEIGHT, Limits, Rights, Tenant
from serve_app.tenants.errors import TenancyError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
PATTERN = re.compile(r"\*|[A-Za-z0-9._*-]{1,96}(:[A-Za-z0-9._*-]{1,96})?")
ORIGIN = re.compile(r"\*|https?://[^/\s?#*]{1,255}")
MAX_ELEMENTS = 256
MAX_COUNT = 2**53
MAX_SHOWN_CHARS = 96

Reader = Callable[[str, object], Any]
"""A value from what was written under a name. Raises TenancyError."""


def tenant_from(declared: object) -> Tenant:
    """What is not said is the default. Raises TenancyError with the name of what is wrong."""
    values = _read("a tenant", FIELDS, declared)
    if "name" not in values:
        raise TenancyError("A tenant needs a name.")
    return Tenant(**{("rights" if name == "models" else name): value for name, value in values.items()})


def told_of(tenant: Tenant) -> dict[str, object]:
    """All of it in the form that `tenant_from` reads."""
    told = asdict(tenant) | {"cors_origins": list(tenant.cors_origins)}
    del told["rights"], told["added"]
    patterns = {"models": list(tenant.rights.patterns), "publishes": list(tenant.publishes.patterns)}
    return {"name": told.pop("name"), **patterns, **{name: told[name] for name in told if name not in patterns}}


def changed(tenant: Tenant, changes: object) -> Tenant:
    """The tenant with some fields otherwise; of its limits, too, those alone that are said. Raises TenancyError."""
    if not isinstance(changes, Mapping):
        raise _refused("a change", "a mapping of fields", changes)
    told = told_of(tenant)
    if changes.get("name", tenant.name) != tenant.name:
        raise TenancyError("name cannot be changed: keys and bills are of it; add another tenant.")
    limits = changes.get("limits", {})
    if isinstance(limits, Mapping):
        changes = {**changes, "limits": {**told["limits"], **limits}}  # type: ignore[dict-item]
    return tenant_from({**told, **changes})


def is_name(text: str) -> bool:
    """Whether a tenant, or a key, could be called so: what could not is asked of no database."""
    return NAME.fullmatch(text) is not None


def _read(what: str, readers: Mapping[str, Reader], declared: object) -> dict[str, Any]:
    if not isinstance(declared, Mapping):
        raise _refused(what, f"a mapping of {', '.join(readers)}", declared)
    for name in declared:
        if name not in readers:
            raise TenancyError(f"{_shown(name)} is no field of {what}; there are {', '.join(readers)}.")
    return {name: readers[name](name, value) for name, value in declared.items()}


def _matching(pattern: re.Pattern[str], words: str) -> Reader:
    def read(name: str, value: object) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise _refused(name, words, value)
        return value

    return read


def _several(reader: Reader) -> Callable[[str, object], tuple[str, ...]]:
    def read(name: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or len(value) > MAX_ELEMENTS:
            raise _refused(name, f"a list of at most {MAX_ELEMENTS}", value)
        return tuple(reader(name, each) for each in value)

    return read


def _or_none(reader: Reader) -> Reader:
    return lambda name, value: None if value is None else reader(name, value)


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
        raise _refused(name, "a whole number of at least 1", value)
    return value


def _number(least: float, most: float) -> Reader:
    def read(name: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise _refused(name, f"a number from {least:g} to {most:g}", value)
        return float(value)

    return read


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refused(name, "true or false", value)
    return value


def _priority(name: str, value: object) -> str:
    if value not in get_args(Priority):
        raise _refused(name, f"one of {', '.join(get_args(Priority))}", value)
    return str(value)


def _rights(name: str, value: object) -> Rights:
    return Rights(_several(_matching(PATTERN, "patterns like base, base:adapter, base:*, *"))(name, value))


def _limits(name: str, value: object) -> Limits:
    budget = _number(LEAST_BUDGET, MOST_BUDGET)
    readers = {each.name: _or_none(budget if each.name in BUDGETS else _count) for each in fields(Limits)}
    return Limits(**_read(name, readers, value))


def _refused(name: str, must: str, found: object) -> TenancyError:
    return TenancyError(f"{name} must be {must}; found {_shown(found)}.")


def _shown(found: object) -> str:
    text = repr(found)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


_NAME = _matching(NAME, "letters, digits, `.`, `_` and `-`, at most 96, the first a letter or digit")
FIELDS: Mapping[str, Reader] = MappingProxyType(
    {
        "name": _NAME,
        "weight": _number(LEAST_WEIGHT, MOST_WEIGHT),
        "priority": _priority,
        "models": _rights,
        "publishes": _rights,
        "limits": _limits,
        "max_n": _or_none(_count),
        "max_tokens": _or_none(_count),
        "cors_origins": _several(_matching(ORIGIN, "origins like https://app.example.org, or *")),
        "cache_group": _or_none(_NAME),
        "log_texts": _number(0, 1),
        "resumes": _switch,
    }
)
"""Every field of a tenant, by the name that it is written under."""


def names_twice(names: Iterable[str]) -> list[str]:
    """Those that occur more than once."""
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
