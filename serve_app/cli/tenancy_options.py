"""What may be said of a tenant on the command line: one table for options and for what is read of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from types import MappingProxyType
from typing import Any

from serve_app.cli.exits import CommandFailed, Exit
from serve_app.cli.offering import Offer

NOTHING = "none"
HOUR_S = 3600.0
DAY_S = 86_400.0
OF_A_TENANT, OF_LIMITS = "What it may", "How much of it"

Reader = Callable[[str], object]


def or_nothing(read: Reader) -> Reader:
    """Reads `none`, which takes a bound away, or a value."""

    def value(text: str) -> object:
        return None if text == NOTHING else read(text)

    value.__name__ = read.__name__
    return value


FIELDS: Mapping[str, tuple[Reader, str]] = MappingProxyType(
    {
        "weight": (float, "Its share beside the others'."),
        "priority": (str, "interactive, standard or batch."),
        "max_n": (or_nothing(int), "Completions of one prompt, or none."),
        "max_tokens": (or_nothing(int), "Of one completion, or none."),
        "cache_group": (or_nothing(str), "Whose members share cached prefixes, or none."),
        "log_texts": (float, "Share of its requests whose texts are logged; 0 is none."),
    }
)
LIMITS: Mapping[str, tuple[Reader, str]] = MappingProxyType(
    {
        "requests_per_minute": (or_nothing(int), "Begun in any minute, or none."),
        "tokens_per_minute": (or_nothing(int), "Of prompts and completions, or none."),
        "max_in_flight": (or_nothing(int), "Requests at once, or none."),
        "max_in_flight_tokens": (or_nothing(int), "Tokens at once, or none."),
        "budget_per_day": (or_nothing(float), "In the currency of the prices, or none."),
        "budget_per_month": (or_nothing(float), "In the currency of the prices, or none."),
    }
)
LISTS: Mapping[str, str] = MappingProxyType(
    {
        "models": "Patterns of models that it may use: base, base:adapter, base:*, *.",
        "cors_origins": "Web pages that may call with its keys.",
    }
)
WANTED = {"int": "an integer", "float": "a number", "str": "a text"}
METAVARS = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT"}


def tenant_offers() -> Sequence[Offer]:
    """Everything that can be said of a tenant."""
    fields, limits = _offers(FIELDS, OF_A_TENANT), _offers(LIMITS, OF_LIMITS)
    lists = [
        Offer(name=name, about=about, metavar="WORD …", is_list=True, panel=OF_A_TENANT)
        for name, about in LISTS.items()
    ]
    return [*lists, *fields, *limits]


def scope_offers() -> Sequence[Offer]:
    """What a key is good for."""
    about = "infer, adapters:write, metrics, admin; usually infer."
    return [Offer(name="scopes", about=about, metavar="WORD …", is_list=True)]


def read_fields(said: Mapping[str, Any]) -> dict[str, object]:
    """What was said of a tenant and nothing else. Raises CommandFailed for what is no value."""
    fields: dict[str, object] = {name: _read(name, said[name], FIELDS[name][0]) for name in FIELDS if name in said}
    fields |= {name: words_of(said, name) for name in LISTS if name in said}
    limits = {name: _read(name, said[name], LIMITS[name][0]) for name in LIMITS if name in said}
    return {**fields, **({"limits": limits} if limits else {})}


def words_of(said: Mapping[str, Any], name: str) -> list[str] | None:
    """The words behind an option that takes several; None where it was not written."""
    return [word for word in said[name] if word] if name in said else None


def day_of(option: str, text: str | None) -> str | None:
    """Return the day that was said, as YYYY-MM-DD in UTC; None where none was. Raises CommandFailed."""
    if text is None:
        return None
    today = datetime.now(UTC).date()
    named = {"today": today, "yesterday": today - timedelta(days=1)}
    try:
        return str(named.get(text) or date.fromisoformat(text))
    except ValueError:
        message = f"{option} must be today, yesterday or a day like 2026-11-22; found {text!r}."
        raise CommandFailed(message, Exit.MISUSED) from None


def _offers(table: Mapping[str, tuple[Reader, str]], panel: str) -> list[Offer]:
    return [
        Offer(name=name, about=about, metavar=METAVARS[read.__name__], panel=panel)
        for name, (read, about) in table.items()
    ]


def _read(name: str, text: str, read: Reader) -> object:
    try:
        return read(text)
    except ValueError:
        wanted = f"{WANTED[read.__name__]}{'' if isinstance(read, type) else f', or {NOTHING}'}"
        raise CommandFailed(f"--{name.replace('_', '-')} must be {wanted}; found {text!r}.", Exit.MISUSED) from None
