"""Commands about tenants, keys and usage, on the store that a cluster file names; the service need not run."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app.cli.offering import SWITCH, said
from serve_app.cli.options import CLUSTER_FILE, AsJson
from serve_app.cli.tenancy_options import HOUR_S, day_of, read_fields, words_of

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
