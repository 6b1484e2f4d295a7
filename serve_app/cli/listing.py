"""Lists what a service has, models and adapters, and checks their folders on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from serve_app.cli.client import query
from serve_app.cli.offering import URL, AsJson, Key, Url, service
from serve_app.cli.screen import CommandFailed, Exit, console, is_watched, say, say_json, table

if TYPE_CHECKING:
    from serve_app.check.folders import FolderReport

GIB = 1 << 30
NEXT = "Serve it: set `path` in the args of an application of cluster.yaml, then `serve_app check`."
NEXT_ADAPTER = "Serve it: put the folder below what `adapters` names in cluster.yaml, then start the service again."

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""As in the args of an application."""
Folder = Annotated[str, typer.Argument(metavar="PATH", help="A folder on this machine.")]


def list_models(context: typer.Context, url: Url = URL, key: Key = None, as_json: AsJson = False) -> int:
    """List what a running service answers to, or check a model's folder."""
    if context.invoked_subcommand is not None:
        return Exit.DONE
    models = service(url, key).models()
    if as_json:
        say_json(models)
    elif not is_watched():
        say("\n".join(str(each["id"]) for each in models))
    else:
        rows = [
            [str(each["id"]), *(str(each.get(name) or "") for name in ("parent", "max_model_len", "engine", "root"))]
            for each in models
        ]
        console().print(table(["model", "base", "context", "engine", "from"], rows))
    return Exit.DONE


def check_model(
    path: Folder,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="That its weights would be loaded in.")] = "auto",
    as_json: AsJson = False,
) -> int:
    """Say whether a model's folder can be served, and what it takes of memory; loads nothing."""
    from serve_app.check.folders import check_model_folder

    return _told([check_model_folder(path, dtype=dtype)], NEXT, as_json=as_json)


def list_adapters(
    model: Annotated[str | None, typer.Option("--model", "-m", help="Of this base. Usually of all.")] = None,
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """List the adapters that a running service has."""
    asked = service(url, key)
    bases = [model] if model is not None else [str(each["id"]) for each in asked.models() if not each.get("parent")]
    found = {base: asked.json(query("/lora-adapters", model=base), member=None) for base in bases}
    if as_json:
        say_json(found)
        return Exit.DONE
    rows = [[str(each["name"]), str(each["id"]), str(each["path"])] for base in bases for each in found[base]]
    if not is_watched():
        say("\n".join(row[0] for row in rows))
    elif rows:
        console().print(table(["adapter", "number", "from"], rows))
    else:
        say("There is no adapter. `serve_app adapters check PATH` says whether a folder of one can be served.")
    return Exit.DONE


def check_adapter(
    path: Folder,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Folder of the base that it is for.")] = None,
    as_json: AsJson = False,
) -> int:
    """Say whether an adapter's folder, or a folder of adapters, can be served; loads nothing."""
    from serve_app.catalog.files import CatalogError
    from serve_app.check.folders import check_adapters

    try:
        reports = check_adapters(path, model)
    except CatalogError as error:
        raise CommandFailed(f"{error}.") from error
    return _told(reports, NEXT_ADAPTER, as_json=as_json)


def _told(reports: Sequence[FolderReport], then: str, *, as_json: bool) -> int:
    is_sound = all(each.reason is None for each in reports)
    if as_json:
        say_json([asdict(each) for each in reports])
    for each in () if as_json else reports:
        told = ", ".join(_fact(name, value) for name, value in each.facts.items() if value != {})
        say(f"{each.name}: OK, {told}" if each.reason is None else f"{each.name}: cannot be served: {each.reason}")
        for note in each.notes:
            say(f"{each.name}: note: {note}")
    if is_sound and not as_json:
        say(then)
    return Exit.DONE if is_sound else Exit.FAILED


def _fact(name: str, value: object) -> str:
    words = name.replace("_", " ")
    if name == "weight_bytes" and isinstance(value, int):
        return f"weights {value / GIB:.2f} GiB"
    if name == "version":
        return f"version {str(value)[:12]}"
    if isinstance(value, bool):
        return words if value else f"{words}: no"
    return f"{words} {value}"
