"""Administers tenants and keys on the store that a cluster file names, whether the service runs or not."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import time
from pathlib import Path
from typing import Any

import yaml

from serve_app.cli.address import read_cluster_file
from serve_app.cli.tenancy_options import DAY_S, FIELDS, HOUR_S, LIMITS, LISTS, field_of
from serve_app.tenants.errors import TenancyError
from serve_app.tenants.office import Office
from serve_app.tenants.opening import open_store
from serve_app.tenants.pepper import DEFAULT_PEPPER, VARIABLE
from serve_app.tenants.reports import csv_of
from serve_app.tenants.store import Author

MAX_ACTOR_CHARS = 96


class TenancyFailed(Exception):
    """What was asked cannot be done; the message is for a person."""


def carry_out(options: argparse.Namespace) -> str:
    """One command; returns what is to be printed. Raises TenancyFailed."""
    service, arguments = _asked(options)
    url, pepper = _store_of(Path(options.file))
    by = Author(name=f"command line of {getpass.getuser()}"[:MAX_ACTOR_CHARS], at=time.time())
    try:
        store, secret = open_store(url, pepper_file=Path(pepper), environment=os.environ.get(VARIABLE))
        try:
            answer = Office(store, secret).answer(service, arguments, by)
        finally:
            store.close()
    except TenancyError as error:
        raise TenancyFailed(str(error)) from error
    if options.command == "usage" and options.csv:
        return csv_of(answer).rstrip()
    return json.dumps(answer, indent=2) if options.json else "\n".join(_lines(service, answer))


def _asked(options: argparse.Namespace) -> tuple[str, dict[str, object]]:
    """The service of the office that a command line means."""
    match options.command, getattr(options, "action", None):
        case "usage", _:
            return "show_usage", {name: getattr(options, name) for name in ("by", "tenant", "since", "until")}
        case "tenants", "add" | "set":
            return f"{options.action}_tenant", _fields(options)
        case "tenants", "remove":
            return "remove_tenant", {"name": options.name}
        case "tenants", "apply":
            return "apply_tenants", {"tenants": _declared(Path(options.tenants_file)), "dry_run": options.dry_run}
        case "keys", "create":
            return _creation(options)
        case "keys", "rotate":
            return "rotate_key", {"id": options.id, "overlap_s": options.overlap_hours * HOUR_S}
        case "keys", "revoke":
            return "revoke_key", {"id": options.id}
        case "keys", "list":
            return "list_keys", {"tenant": options.tenant}
        case _:
            return "list_tenants", {}


def _fields(options: argparse.Namespace) -> dict[str, object]:
    """What was said of a tenant and nothing else."""
    said = vars(options)
    fields = {field_of(flag): said[field_of(flag)] for flag in (*FIELDS, *LISTS) if field_of(flag) in said}
    limits = {field_of(flag): said[field_of(flag)] for flag in LIMITS if field_of(flag) in said}
    return {"name": options.name, **fields, **({"limits": limits} if limits else {})}


def _creation(options: argparse.Namespace) -> tuple[str, dict[str, object]]:
    lifetime_s = None if options.days is None else options.days * DAY_S
    if options.admin and options.scopes:
        raise TenancyFailed("--admin says what the key is for; leave --scopes out.")
    if options.admin:
        return "create_admin_key", {"lifetime_s": lifetime_s}
    return "create_key", {"tenant": options.tenant, "scopes": options.scopes, "lifetime_s": lifetime_s}


def _declared(file: Path) -> object:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TenancyFailed(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or list(content) != ["tenants"]:
        raise TenancyFailed(f"{file} must be a mapping with `tenants`, a list, and nothing else.")
    return content["tenants"]


def _store_of(file: Path) -> tuple[str, str]:
    """URL and file of the pepper. Raises TenancyFailed where the cluster file names no store."""
    applications = read_cluster_file(file).get("applications")
    for application in applications if isinstance(applications, list) else ():
        args = application.get("args") if isinstance(application, dict) else None
        if isinstance(args, dict) and args.get("store"):
            return str(args["store"]), str(args.get("pepper") or DEFAULT_PEPPER)
    raise TenancyFailed(
        f"{file} names no store: set `store: sqlite:///serve_app.db` in the args of its router's application."
    )


def _lines(service: str, answer: dict[str, Any]) -> list[str]:
    """The answer for a person."""
    match service:
        case "show_usage":
            return ["  ".join(f"{name}={value}" for name, value in each.items()) for each in answer["data"]]
        case "list_tenants":
            return [_told_of_tenant(each) for each in answer["data"]] or ["There is no tenant."]
        case "list_keys":
            return [_told_of_key(each) for each in answer["data"]] or ["There is no key."]
        case "create_key" | "create_admin_key" | "rotate_key":
            told = [answer["key"], "", f"{answer['id']} of {answer['tenant']}; it is shown this once: keep it now."]
            return told
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
    told = [f"{name}={value}" for name, value in (limits | bounds).items()]
    models = ",".join(tenant["models"]) or "(no model)"
    return "  ".join([tenant["name"], models, tenant["priority"], f"weight={tenant['weight']:g}", *told])


def _told_of_key(key: dict[str, Any]) -> str:
    ends = [end for end in (key["expires_at"], key["revoked_at"]) if end is not None]
    until = f"until {_written(min(ends))}" if ends else "until it is revoked"
    state = until if key["is_valid"] else f"ended {_written(min(ends))}"
    return "  ".join([key["id"], key["tenant"], ",".join(key["scopes"]), state])


def _told_of_difference(answer: dict[str, Any]) -> list[str]:
    lines = [f"+ {_told_of_tenant(tenant)}" for tenant in answer["added"]]
    for name, fields in answer["changed"].items():
        lines += [f"~ {name}: {field} {json.dumps(old)} → {json.dumps(new)}" for field, (old, new) in fields.items()]
    return [*lines, *(f"- {name}, with its keys" for name in answer["removed"])] or ["Nothing differs."]


def _written(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
