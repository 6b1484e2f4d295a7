"""Commands about tenants, keys and usage, on the store that a cluster file names; the service need not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from types import MappingProxyType
from typing import Annotated, Any

import typer

from serve_app.cli.offering import CLUSTER_FILE, SWITCH, AsJson, Offer, said
from serve_app.cli.screen import CommandFailed, Exit

File = Annotated[str, typer.Option("--file", help="Whose router names the store.")]
Name = Annotated[str, typer.Argument(help="Of the tenant.")]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="Of the key, as `serve_app keys list` tells it.")]


def add_tenant(context: typer.Context, name: Name, file: File = CLUSTER_FILE, as_json: AsJson = False) -> int:
    """Add a tenant."""
    return _carry_out("add_tenant", {"name": name, **read_fields(said(context))}, file, as_json)


def set_tenant(context: typer.Context, name: Name, file: File = CLUSTER_FILE, as_json: AsJson = False) -> int:
    """Change what is said of a tenant, and nothing else."""
    return _carry_out("set_tenant", {"name": name, **read_fields(said(context))}, file, as_json)


def list_tenants(file: File = CLUSTER_FILE, as_json: AsJson = False) -> int:
    """List the tenants."""
    return _carry_out("list_tenants", {}, file, as_json)


def remove_tenant(name: Name, file: File = CLUSTER_FILE, as_json: AsJson = False) -> int:
    """Remove a tenant with its keys."""
    return _carry_out("remove_tenant", {"name": name}, file, as_json)


def apply_tenants(
    tenants_file: Annotated[str, typer.Argument(help="The tenants, all of them.")] = "tenants.yaml",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar=SWITCH, help="Say what would change, and change nothing.")
    ] = False,
    file: File = CLUSTER_FILE,
    as_json: AsJson = False,
) -> int:
    """Let the tenants of a file be all there are."""
    from serve_app.cli.tenancy import declared

    return _carry_out("apply_tenants", {"tenants": declared(tenants_file), "dry_run": dry_run}, file, as_json)


def create_key(
    context: typer.Context,
    tenant: Annotated[str | None, typer.Argument(help="Whose key it is.")] = None,
    admin: Annotated[
        bool, typer.Option("--admin", metavar=SWITCH, help="For /admin and /metrics, and for no model.")
    ] = False,
    days: Annotated[float | None, typer.Option("--days", help="That it is good for. Usually until revoked.")] = None,
    file: File = CLUSTER_FILE,
    as_json: AsJson = False,
) -> int:
    """Make a key, which is shown this once."""
    from serve_app.cli.tenancy import creation

    scopes = words_of(said(context), "scopes")
    return _carry_out(*creation(tenant, is_admin=admin, scopes=scopes, days=days), file, as_json)


def rotate_key(
    key_id: KeyId,
    overlap_hours: Annotated[float, typer.Option("--overlap-hours", help="The old one stays good.")] = 24.0,
    file: File = CLUSTER_FILE,
    as_json: AsJson = False,
) -> int:
    """Make a key in the place of another."""
    return _carry_out("rotate_key", {"id": key_id, "overlap_s": overlap_hours * HOUR_S}, file, as_json)


def revoke_key(key_id: KeyId, file: File = CLUSTER_FILE, as_json: AsJson = False) -> int:
    """Let a key be good for nothing."""
    return _carry_out("revoke_key", {"id": key_id}, file, as_json)


def list_keys(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Of this one alone.")] = None,
    file: File = CLUSTER_FILE,
    as_json: AsJson = False,
) -> int:
    """List keys, none of which can be read."""
    return _carry_out("list_keys", {"tenant": tenant}, file, as_json)


def backup(
    copy: Annotated[str, typer.Argument(metavar="COPY", help="A new file.")],
    file: File = CLUSTER_FILE,
    as_json: AsJson = False,
) -> int:
    """Copy the whole store (tenants, keys, events, usage) into a new file, while the service runs or not."""
    from serve_app.cli.tenancy import copy as copied  # imports SQLAlchemy

    return copied(copy, file=file, as_json=as_json)


def usage(
    by: Annotated[str, typer.Option("--by", help="Of tenant,model,adapter,key_id,day.")] = "tenant,model,day",
    tenant: Annotated[str | None, typer.Option("--tenant", help="Of this one alone.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="From this day on: today, yesterday, 2026-11-22.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="To this day, which is included.")] = None,
    csv: Annotated[bool, typer.Option("--csv", metavar=SWITCH, help="As comma-separated values.")] = False,
    file: File = CLUSTER_FILE,
    as_json: AsJson = False,
) -> int:
    """Say who used what, and what it cost."""
    asked: dict[str, object] = {
        "by": by,
        "tenant": tenant,
        "since": day_of("--since", since),
        "until": day_of("--until", until),
    }
    return _carry_out("show_usage", asked, file, as_json, as_csv=csv)


def events(
    after: Annotated[int, typer.Option("--after", help="Those behind this number, 1000 at most.")] = 0,
    file: File = CLUSTER_FILE,
    as_json: AsJson = False,
) -> int:
    """Say what was changed of tenants and keys, when and by whom."""
    return _carry_out("list_events", {"after": after}, file, as_json)


def _carry_out(service: str, arguments: dict[str, object], file: str, as_json: bool, *, as_csv: bool = False) -> int:
    from serve_app.cli.tenancy import carry_out  # imports SQLAlchemy

    return carry_out(service, arguments, file=file, as_json=as_json, as_csv=as_csv)


NOTHING = "none"
HOUR_S = 3600.0
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
        "publishes": "Patterns of names that it may publish adapters under: base:adapter, base:team-*.",
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
