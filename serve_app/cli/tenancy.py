"""Administers tenants and keys on the store that a cluster file names, whether the service runs or not."""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.check.document import UnreadableYaml, read_document
from serve_app.cli.address import read_cluster_file, store_of
from serve_app.cli.screen import CommandFailed, answer, remark
from serve_app.cli.up import runs_of
from serve_app.core.ledger import csv_of
from serve_app.tenants.admin_service import AdminService
from serve_app.tenants.errors import TenancyError
from serve_app.tenants.keys import VARIABLE
from serve_app.tenants.opening import copy_store, open_store
from serve_app.tenants.store import Author, TenantStore, engine_of, file_of

MAX_ACTOR_CHARS = 96
BEGINNING = frozenset({"add_tenant", "apply_tenants", "create_key", "create_admin_key"})
"""Services that begin a store where there is none; no other has anything to do there."""


def carry_out(service: str, arguments: Mapping[str, object], *, file: str, as_json: bool, as_csv: bool = False) -> int:
    """Carry out one service of the admin service on the store that the file names. Raises CommandFailed."""
    url, pepper = _store_of(file)
    by = Author(name=f"command line of {_who()}"[:MAX_ACTOR_CHARS], at=time.time())
    try:
        store, secret = _opened(url, pepper, file, begins=service in BEGINNING and not arguments.get("dry_run"))
        try:
            found = AdminService(store, secret).answer(service, dict(arguments), by)
        finally:
            store.close()
    except TenancyError as error:
        raise CommandFailed(str(error)) from error
    words = csv_of(found).rstrip() if as_csv else "\n".join(_lines(service, found))
    return answer(found, words, as_json=as_json)


def copy(target: str, *, file: str, as_json: bool) -> int:
    """Copy the store that the file names. Raises CommandFailed."""
    url, pepper = _store_of(file)
    try:
        copied = copy_store(url, Path(target))
    except TenancyError as error:
        raise CommandFailed(str(error)) from error
    words = f"{target} is {copied} as it was now; its pepper ({pepper}) is not in it: keep a copy of that elsewhere."
    return answer({"store": str(copied), "copy": target}, words, as_json=as_json)


def _opened(url: str, pepper: Path, file: str, *, begins: bool) -> tuple[TenantStore, bytes]:
    """Open the store; begin a new one, and say so, where the command may and no service of the file has another open.

    Raises TenancyError, CommandFailed.
    """
    place = file_of(engine_of(url).url)
    if begins and place is not None and not place.exists():
        if runs_of(file):
            raise CommandFailed(
                f"There is no store of tenants at {place.resolve()}, and a service of {file} runs that has it open: it"
                " was moved, or that was started in another folder. Put it back, or run this there."
            )
        remark(f"serve_app: this begins a new store, {place.resolve()}, with its pepper, {pepper.resolve()}")
    return open_store(url, pepper_file=pepper, environment=os.environ.get(VARIABLE), begins=begins)


def declared(file: str) -> object:
    """Return the tenants of a file. Raises CommandFailed."""
    try:
        document = read_document(Path(file).read_text(encoding="utf-8"))
    except UnreadableYaml as error:
        raise CommandFailed(f"{file}:{error.line} cannot be read: {error.message}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{file} cannot be read: {error}") from error
    if document.duplicates:
        twice = document.duplicates[0]
        raise CommandFailed(f"{file}:{document.line(twice.path)} {twice.message}.")
    content = document.data
    if not isinstance(content, dict) or list(content) != ["tenants"]:
        raise CommandFailed(f"{file} must be a mapping with `tenants`, a list, and nothing else.")
    return content["tenants"]


def _who() -> str:
    """Return the user's name, or number: in a container nobody need have a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _store_of(file: str) -> tuple[str, Path]:
    """Return the store's URL and the pepper's file. Raises CommandFailed where the cluster file names no store."""
    if (found := store_of(read_cluster_file(Path(file)))) is None:
        must = "set `store: sqlite:///serve_app.db` in the args of its router's application"
        raise CommandFailed(f"{file} names no store: {must}.")
    return found


def _lines(service: str, answer: dict[str, Any]) -> list[str]:
    """Return the answer for a person."""
    match service:
        case "show_usage":
            told = ["  ".join(f"{name}={value}" for name, value in each.items()) for each in answer["data"]]
            return told or ["Nothing was used."]
        case "list_tenants":
            return [_told_of_tenant(each) for each in answer["data"]] or ["There is no tenant."]
        case "list_keys":
            return [_told_of_key(each) for each in answer["data"]] or ["There is no key."]
        case "list_events":
            told = [_told_of_event(each) for each in answer["data"]] or ["Nothing was changed."]
            return told + ([f"There are more: --after {answer['data'][-1]['id']}"] if answer["has_more"] else [])
        case "create_key" | "create_admin_key" | "rotate_key":
            return [answer["key"], "", f"{answer['id']} of {answer['tenant']}; it is shown this once: keep it now."]
        case "apply_tenants":
            return _told_of_difference(answer)
        case "revoke_key":
            return [f"{answer['id']} of {answer['tenant']} is good for nothing now."]
        case "remove_tenant":
            return [f"{answer['removed']} is removed, and its keys."]
        case _:
            return [_told_of_tenant(answer)]


def _told_of_tenant(tenant: dict[str, Any]) -> str:
    limits = {name: value for name, value in tenant["limits"].items() if value is not None}
    bounds = {name: tenant[name] for name in ("max_n", "max_tokens", "cache_group") if tenant[name] is not None}
    if tenant["publishes"]:
        bounds["publishes"] = ",".join(tenant["publishes"])
    if not tenant["resumes"]:
        bounds["resumes"] = "false"
    if tenant["log_texts"]:
        bounds["log_texts"] = tenant["log_texts"]
    told = [f"{name}={value}" for name, value in (limits | bounds).items()]
    models = ",".join(tenant["models"]) or "(no model)"
    return "  ".join([tenant["name"], models, tenant["priority"], f"weight={tenant['weight']:g}", *told])


def _told_of_key(key: dict[str, Any]) -> str:
    ends = [end for end in (key["expires_at"], key["revoked_at"]) if end is not None]
    until = f"until {_written(min(ends))}" if ends else "until it is revoked"
    state = until if key["is_valid"] else f"ended {_written(min(ends))}"
    return "  ".join([key["id"], key["tenant"], ",".join(key["scopes"]), state])


def _told_of_event(event: dict[str, Any]) -> str:
    details = f"  {json.dumps(event['details'], ensure_ascii=False)}" if event["details"] else ""
    told = (str(event["id"]), _written(event["at"]), event["actor"], event["action"], event["subject"])
    return "  ".join(told) + details


def _told_of_difference(answer: dict[str, Any]) -> list[str]:
    lines = [f"+ {_told_of_tenant(tenant)}" for tenant in answer["added"]]
    for name, fields in answer["changed"].items():
        lines += [f"~ {name}: {field} {json.dumps(old)} → {json.dumps(new)}" for field, (old, new) in fields.items()]
    return [*lines, *(f"- {name}, with its keys" for name in answer["removed"])] or ["Nothing differs."]


def _written(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
