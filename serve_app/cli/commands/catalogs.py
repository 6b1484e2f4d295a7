"""Commands about models and adapters: those that a service has, and those in a folder."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from serve_app.cli.options import URL, AsJson, Key, Url, service

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""As in the args of an application."""
Folder = Annotated[str, typer.Argument(metavar="PATH", help="A folder on this machine.")]


def models(context: typer.Context, url: Url = URL, key: Key = None, as_json: AsJson = False) -> int:
    """List what a running service answers to, or check a model's folder."""
    if context.invoked_subcommand is not None:
        return 0
    from serve_app.cli.listing import list_models

    return list_models(service(url, key), as_json=as_json)


def check_model(
    path: Folder,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="That its weights would be loaded in.")] = "auto",
    as_json: AsJson = False,
) -> int:
    """Say whether a model's folder can be served, and what it takes of memory; loads nothing."""
    from serve_app.cli.paths import check_model_path

    return check_model_path(path, dtype=dtype, as_json=as_json)


def list_adapters(
    model: Annotated[str | None, typer.Option("--model", "-m", help="Of this base. Usually of all.")] = None,
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """List the adapters that a running service has."""
    from serve_app.cli.listing import list_adapters as listed

    return listed(service(url, key), model, as_json=as_json)


def check_adapter(
    path: Folder,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Folder of the base that it is for.")] = None,
    as_json: AsJson = False,
) -> int:
    """Say whether an adapter's folder, or a folder of adapters, can be served; loads nothing."""
    from serve_app.cli.paths import check_adapter_path

    return check_adapter_path(path, model, as_json=as_json)
