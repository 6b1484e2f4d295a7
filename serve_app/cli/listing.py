"""Lists what a service has, publishes adapters on it, and checks folders of models and adapters on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from serve_app.catalog.sources import is_address
from serve_app.cli.client import Service, ServiceFailed, query
from serve_app.cli.offering import SWITCH, URL, AsJson, Key, Url, service
from serve_app.cli.screen import CommandFailed, Exit, answer, console, is_watched, say, say_json, table

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
    models, names = service(url, key).models(), ("parent", "max_model_len", "engine", "root")
    rows = [[str(each["id"]), *(str(each.get(name) or "") for name in names)] for each in models]
    heads = ["model", "base", "context", "engine", "from"]
    return _listed(models, heads, rows, nothing="There is no model.", as_json=as_json)


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
    rows = [[str(each["name"]), str(each["id"]), str(each["path"])] for base in bases for each in found[base]]
    nothing = "There is no adapter. `serve_app adapters check PATH` says whether a folder of one can be served."
    return _listed(found, ["adapter", "number", "from"], rows, nothing=nothing, as_json=as_json)


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


def _listed(
    found: object,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    nothing: str,
    as_json: bool,
    num_plain: int = 1,
) -> int:
    """Show a table to a person; a program gets JSON, or lines of the first columns."""
    if as_json:
        say_json(found)
    elif not is_watched():
        say("\n".join("\t".join(row[:num_plain]) for row in rows))
    elif rows:
        console().print(table(heads, rows))
    else:
        say(nothing)
    return Exit.DONE


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


ROUTE = "/admin/adapters"
FORBIDDEN = 403
NUM_SHOWN_CHARS = 12
"""Of a version; a beginning of 8 characters names one."""

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="base:adapter, or the adapter's name alone where one base is served.")
]


def publish_adapter(
    name: Name,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Its folder or address (s3://…), below one that the service allows.")
    ],
    in_place: Annotated[
        bool, typer.Option("--in-place", metavar=SWITCH, help="Replace what the name means now.")
    ] = False,
    canary: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Try it on a share of the requests for the name, such as 5%."),
    ] = None,
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Let a name mean the adapter in a folder, on every replica; nothing restarts."""
    asked = service(url, key)
    body: dict[str, object] = {
        "lora_name": name,
        "lora_path": path if is_address(path) else str(Path(path).absolute()),
        "load_inplace": in_place,
    }
    if canary is not None:
        body["canary"] = canary
    try:
        return _told_of_version(asked.json(ROUTE, body, member="version"), as_json=as_json)
    except ServiceFailed as failure:
        return _as_tenant(asked, "load", body, failure, as_json=as_json)


def roll_back_adapter(name: Name, url: Url = URL, key: Key = None, as_json: AsJson = False) -> int:
    """End a name's canary; without one, let the name mean the version that it meant before."""
    found = service(url, key).json(f"{ROUTE}/rollback", {"lora_name": name}, member="version")
    return _told_of_version(found, as_json=as_json)


def withdraw_adapter(name: Name, url: Url = URL, key: Key = None, as_json: AsJson = False) -> int:
    """Serve an adapter no longer, even if its folder stays."""
    asked = service(url, key)
    try:
        found = asked.json(query(ROUTE, lora_name=name), method="DELETE", member="withdrawn")
    except ServiceFailed as failure:
        return _as_tenant(asked, "unload", {"lora_name": name}, failure, as_json=as_json)
    words = f"{found['withdrawn']} is withdrawn; requests that run end as they began."
    return answer(found, words, as_json=as_json)


def _as_tenant(asked: Service, verb: str, body: dict[str, object], failure: ServiceFailed, *, as_json: bool) -> int:
    """Ask again by the route of tenants where the key is no administrator's. Raises any other failure."""
    if failure.status != FORBIDDEN:
        raise failure
    said = asked.text(f"/v1/{verb}_lora_adapter", body, word="Success")
    return answer({"said": said}, said, as_json=as_json)


def list_versions(url: Url = URL, key: Key = None, as_json: AsJson = False) -> int:
    """List adapters with their versions, who published them, and how many replicas serve them."""
    found = service(url, key).json(ROUTE, member="revision")
    rows = [_row(each) for each in found["data"]]
    heads = ["adapter", "version", "before", "published", "by", "replicas", "canary"]
    nothing = "There is no adapter. `serve_app adapters publish NAME PATH` publishes one."
    return _listed(found, heads, rows, nothing=nothing, as_json=as_json, num_plain=len(heads))


def _told_of_version(entry: dict[str, Any], *, as_json: bool) -> int:
    replicas = f"{entry['replicas']} of {entry['ready_replicas']} replicas"
    words = f"{entry['id']} is version {_short(entry['version'])} on {replicas}."
    if entry["canary"] is not None:
        words += f"\nCanary {_canary(entry['canary'])}: `serve_app adapters rollback {entry['id']}` ends it."
    elif entry["previous"] is not None:
        before = _short(entry["previous"]["version"])
        words += f"\nBefore it was {before}: `serve_app adapters rollback {entry['id']}` brings that back."
    return answer(entry, words, as_json=as_json)


def _row(entry: dict[str, Any]) -> list[str]:
    at, previous = entry["published_at"], entry["previous"]
    return [
        str(entry["id"]),
        _version_or_why(entry),
        "" if previous is None else _short(previous["version"]),
        "in its folder" if at is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at)),
        str(entry["by"] or ""),
        f"{entry['replicas']} of {entry['ready_replicas']}",
        "" if entry["canary"] is None else _canary(entry["canary"]),
    ]


def _version_or_why(entry: dict[str, Any]) -> str:
    version = _short(entry["version"]) if entry["reason"] is None else f"unusable: {entry['reason']}"
    return version if entry["refused"] is None else f"{version} (its folder is refused: {entry['refused']})".strip()


def _canary(canary: dict[str, Any]) -> str:
    divergence = "" if canary["divergence"] is None else f", divergence {canary['divergence']:.3g}"
    counted = canary["counted"]
    shown = f"{counted['requests']} requests, {counted['errors']} failed{divergence}"
    held = "" if canary["held"] is None else f"; held: {canary['held']}"
    return f"{_short(canary['version'])} at {100 * canary['share']:.4g}% of requests ({shown}{held})"


def _short(version: object) -> str:
    return str(version)[:NUM_SHOWN_CHARS]
