"""The tree of commands, by what they are for. One that is new is a line here and a function of its subject's module."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from serve_app.cli import batch, bench, capsules, chat, commands, complete, listing, top, whatif
from serve_app.cli import tenancy_commands as tenancy
from serve_app.cli.offering import offering
from serve_app.cli.parameters import offers
from serve_app.cli.tenancy_commands import scope_offers, tenant_offers
from serve_app.core.version import service_version

NAME = "serve_app"
SERVE, ASK, LOOK, FOLDERS, TENANCY = (
    "Serve models",
    "Ask a service",
    "Look at a service",
    "Models and adapters",
    "Tenants, keys and usage",
)


ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("serve", "run", "start", "deploy"), "up"),
    **dict.fromkeys(("stop", "shutdown", "kill"), "down"),
    **dict.fromkeys(("list", "ls"), "models"),
    **dict.fromkeys(("status", "ps"), "top"),
    **dict.fromkeys(("validate", "lint"), "check"),
    **dict.fromkeys(("generate", "completion"), "complete"),
    "version": "--version",
    "help": "--help",
}
"""What other programs call a command of ours."""


class Hinting(TyperGroup):
    """The commands; a word of another program is told ours."""

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        if arguments and (ours := ELSEWHERE.get(arguments[0])) is not None:
            context.fail(f"No such command {arguments[0]!r}. Did you mean '{ours}'?")
        return super().resolve_command(context, arguments)


def command() -> Any:
    """Return the whole tree, as typer carries it out."""
    app = typer.Typer(
        name=NAME,
        cls=Hinting,
        help="Text completion of many models and adapters on Ray Serve.",
        rich_markup_mode="rich",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    # every parameter is an option
    of_completions, of_chats = (offering(partial(offers, kind)) for kind in ("CompletionRequest", "ChatRequest"))
    for panel, kind, each in (
        (SERVE, None, commands.up),
        (SERVE, None, commands.down),
        (SERVE, None, commands.check),
        (SERVE, None, commands.doctor),
        (SERVE, None, commands.env),
        (ASK, of_completions, complete.complete),
        (ASK, of_chats, chat.chat),
        (ASK, of_completions, complete.compare),
        (ASK, of_completions, complete.explain),
        (ASK, None, capsules.capture),
        (ASK, None, capsules.replay),
        (LOOK, None, top.top),
        (LOOK, None, bench.bench),
    ):
        app.command(cls=kind, rich_help_panel=panel)(each)
    batches = typer.Typer(help="Answer files of requests.", no_args_is_help=True)
    batches.command("run", cls=of_completions)(batch.run)
    app.add_typer(batches, name="batch", rich_help_panel=ASK)
    simulated = typer.Typer(help="Simulate traffic: other replicas, another placement.", no_args_is_help=True)
    simulated.command("run")(whatif.run)
    simulated.command("fit")(whatif.fit)
    app.add_typer(simulated, name="whatif", rich_help_panel=LOOK)
    _add_folders(app)
    _add_tenancy(app)
    return typer.main.get_command(app)


def _root(
    shows_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Text completion of many models and adapters on Ray Serve."""


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"{NAME} {service_version()}", flush=True)
        raise typer.Exit


def _add_folders(app: typer.Typer) -> None:
    models = typer.Typer(invoke_without_command=True)
    models.callback()(listing.list_models)
    models.command("check")(listing.check_model)
    app.add_typer(models, name="models", rich_help_panel=FOLDERS)
    adapters = typer.Typer(
        help="List and publish the adapters of a running service, or check folders of them.", no_args_is_help=True
    )
    adapters.command("list")(listing.list_adapters)
    adapters.command("check")(listing.check_adapter)
    adapters.command("publish")(listing.publish_adapter)
    adapters.command("rollback")(listing.roll_back_adapter)
    adapters.command("withdraw")(listing.withdraw_adapter)
    adapters.command("versions")(listing.list_versions)
    app.add_typer(adapters, name="adapters", rich_help_panel=FOLDERS)


def _add_tenancy(app: typer.Typer) -> None:
    of_tenants, of_scopes = offering(tenant_offers), offering(scope_offers)
    tenants = typer.Typer(help="Say which teams may use the service, and how much of it.", no_args_is_help=True)
    tenants.command("add", cls=of_tenants)(tenancy.add_tenant)
    tenants.command("set", cls=of_tenants)(tenancy.set_tenant)
    tenants.command("list")(tenancy.list_tenants)
    tenants.command("remove")(tenancy.remove_tenant)
    tenants.command("apply")(tenancy.apply_tenants)
    app.add_typer(tenants, name="tenants", rich_help_panel=TENANCY)
    keys = typer.Typer(help="Make, exchange and revoke the keys of tenants.", no_args_is_help=True)
    keys.command("create", cls=of_scopes)(tenancy.create_key)
    keys.command("rotate")(tenancy.rotate_key)
    keys.command("revoke")(tenancy.revoke_key)
    keys.command("list")(tenancy.list_keys)
    keys.command("backup")(tenancy.backup)
    app.add_typer(keys, name="keys", rich_help_panel=TENANCY)
    app.command(rich_help_panel=TENANCY)(tenancy.usage)
    app.command(rich_help_panel=TENANCY)(tenancy.events)
