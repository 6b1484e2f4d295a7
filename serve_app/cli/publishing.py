"""Publishes adapters on a running service, and lists their versions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from serve_app.catalog.sources import is_address
from serve_app.cli.offering import SWITCH, URL, AsJson, Key, Url, service
from serve_app.cli.screen import Exit, console, is_watched, say, say_json, table

ROUTE = "/admin/adapters"
OF_TENANTS = "/v1/{}_lora_adapter"
"""For keys that are not an administrator's; they are told less."""
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
    from serve_app.cli.client import ServiceFailed

    asked = service(url, key)
    body = {
        "lora_name": name,
        "lora_path": path if is_address(path) else str(Path(path).absolute()),
        "load_inplace": in_place,
    }
    if canary is not None:
        body["canary"] = canary
    try:
        return _told(asked.json(ROUTE, body, member="version"), as_json=as_json)
    except ServiceFailed as failure:
        if failure.status != FORBIDDEN:
            raise
    return _said(asked.text(OF_TENANTS.format("load"), body, word="Success"), as_json=as_json)


def roll_back_adapter(name: Name, url: Url = URL, key: Key = None, as_json: AsJson = False) -> int:
    """End a name's canary; without one, let the name mean the version that it meant before."""
    answer = service(url, key).json(f"{ROUTE}/rollback", {"lora_name": name}, member="version")
    return _told(answer, as_json=as_json)


def withdraw_adapter(name: Name, url: Url = URL, key: Key = None, as_json: AsJson = False) -> int:
    """Serve an adapter no longer, even if its folder stays."""
    from serve_app.cli.client import ServiceFailed, query

    asked = service(url, key)
    try:
        answer = asked.json(query(ROUTE, lora_name=name), method="DELETE", member="withdrawn")
    except ServiceFailed as failure:
        if failure.status != FORBIDDEN:
            raise
        return _said(asked.text(OF_TENANTS.format("unload"), {"lora_name": name}, word="Success"), as_json=as_json)
    if as_json:
        say_json(answer)
    else:
        say(f"{answer['withdrawn']} is withdrawn; requests that run end as they began.")
    return Exit.DONE


def list_versions(url: Url = URL, key: Key = None, as_json: AsJson = False) -> int:
    """List adapters with their versions, who published them, and how many replicas serve them."""
    answer = service(url, key).json(ROUTE, member="revision")
    rows = [_row(each) for each in answer["data"]]
    if as_json:
        say_json(answer)
    elif not is_watched():
        say("\n".join("\t".join(row) for row in rows))
    elif rows:
        titles = ["adapter", "version", "before", "published", "by", "replicas", "canary"]
        console().print(table(titles, rows))
    else:
        say("There is no adapter. `serve_app adapters publish NAME PATH` publishes one.")
    return Exit.DONE


def _told(entry: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        say_json(entry)
        return Exit.DONE
    replicas = f"{entry['replicas']} of {entry['ready_replicas']} replicas"
    say(f"{entry['id']} is version {_short(entry['version'])} on {replicas}.")
    if entry["canary"] is not None:
        say(f"Canary {_canary(entry['canary'])}: `serve_app adapters rollback {entry['id']}` ends it.")
    elif entry["previous"] is not None:
        before = _short(entry["previous"]["version"])
        say(f"Before it was {before}: `serve_app adapters rollback {entry['id']}` brings that back.")
    return Exit.DONE


def _said(text: str, *, as_json: bool) -> int:
    if as_json:
        say_json({"said": text})
    else:
        say(text)
    return Exit.DONE


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
