"""Commands about tenants, keys and usage, on the store that a cluster file names; the service need not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer

from serve_app.cli.offering import CLUSTER_FILE, SWITCH, AsJson, Offer, said
from serve_app.cli.screen import CommandFailed, Exit
from serve_app.core.tenants import Limits, Tenant

File = Annotated[str, typer.Option("--file", help="Whose router names the store.")]
Name = Annotated[str, typer.Argument(help="Of the tenant.")]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="Of the key, as `serve_app keys list` tells it.")]

NOTHING = "none"
HOUR_S, DAY_S = 3600.0, 86_400.0
OF_A_TENANT, OF_LIMITS = "What it may", "How much of it"


FIELDS: Mapping[str, str] = {
    "weight": "Its share beside the others'.",
    "priority": "interactive, standard or batch.",
    "max_n": "Completions of one prompt, or none.",
    "max_tokens": "Of one completion, or none.",
    "cache_group": "Whose members share cached prefixes, or none.",
    "log_texts": "Share of its requests whose texts are logged; 0 is none.",
    "resumes": "Whether its streams are kept for clients that lose them.",
}
LIMITS: Mapping[str, str] = {
    "requests_per_minute": "Begun in any minute, or none.",
    "tokens_per_minute": "Of prompts and completions, or none.",
    "max_in_flight": "Requests at once, or none.",
    "max_in_flight_tokens": "Tokens at once, or none.",
    "budget_per_day": "In the currency of the prices, or none.",
    "budget_per_month": "In the currency of the prices, or none.",
}
LISTS: Mapping[str, str] = {
    "models": "Patterns of models that it may use: base, base:adapter, base:*, *.",
    "publishes": "Patterns of names that it may publish adapters under: base:adapter, base:team-*.",
    "cors_origins": "Web pages that may call with its keys.",
}
KINDS: Mapping[type, tuple[str, str]] = {
    bool: ("true|false", "true or false"),
    int: ("INTEGER", "an integer"),
    float: ("NUMBER", "a number"),
    str: ("TEXT", "a text"),
}
"""What a value is called where it is asked for, and where it is refused."""


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
    scopes = words_of(said(context), "scopes")
    if admin == (tenant is not None):
        raise CommandFailed("A key is of a tenant or, with --admin, of administrators: name one of them.", Exit.MISUSED)
    if admin and scopes:
        raise CommandFailed("--admin says what the key is for; leave --scopes out.", Exit.MISUSED)
    asked: dict[str, object] = {"lifetime_s": None if days is None else days * DAY_S}
    if not admin:
        asked |= {"tenant": tenant, "scopes": scopes}
    return _carry_out("create_admin_key" if admin else "create_key", asked, file, as_json)


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


def tenant_offers() -> Sequence[Offer]:
    """Return an option for everything that can be said of a tenant."""
    fields, limits = _offers(FIELDS, OF_A_TENANT), _offers(LIMITS, OF_LIMITS)
    lists = [
        Offer(name=name, about=about, metavar="WORD …", is_list=True, panel=OF_A_TENANT)
        for name, about in LISTS.items()
    ]
    return [*lists, *fields, *limits]


def scope_offers() -> Sequence[Offer]:
    """Return the option that says what a key is good for."""
    about = "infer, adapters:write, metrics, admin; usually infer."
    return [Offer(name="scopes", about=about, metavar="WORD …", is_list=True)]


def read_fields(said: Mapping[str, Any]) -> dict[str, object]:
    """Return what was said of a tenant and nothing else. Raises CommandFailed for what is no value."""
    fields: dict[str, object] = {name: _read(name, said[name]) for name in FIELDS if name in said}
    fields |= {name: words_of(said, name) for name in LISTS if name in said}
    limits = {name: _read(name, said[name]) for name in LIMITS if name in said}
    return {**fields, **({"limits": limits} if limits else {})}


def words_of(said: Mapping[str, Any], name: str) -> list[str] | None:
    """Return the words behind an option that takes several; None where it was not written."""
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


def _offers(table: Mapping[str, str], panel: str) -> list[Offer]:
    return [
        Offer(name=name, about=about, metavar=KINDS[_kind(name)[0]][0], panel=panel) for name, about in table.items()
    ]


def _kind(name: str) -> tuple[type, bool]:
    """Return the type of a tenant's field or limit, and whether `none` may stand in its place."""
    hint = (get_type_hints(Tenant) | get_type_hints(Limits))[name]
    parts = get_args(hint) or (hint,)
    return next((kind for kind in KINDS if kind in parts), str), NoneType in parts


def _read(name: str, text: str) -> object:
    kind, takes_none = _kind(name)
    if takes_none and text == NOTHING:
        return None
    try:
        return {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (ValueError, KeyError):
        wanted = KINDS[kind][1] + (f", or {NOTHING}" if takes_none else "")
        raise CommandFailed(f"--{name.replace('_', '-')} must be {wanted}; found {text!r}.", Exit.MISUSED) from None
