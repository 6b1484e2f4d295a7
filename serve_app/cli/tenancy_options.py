"""What may be written behind `serve_app tenants` and `serve_app keys`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import MappingProxyType

NOTHING = "none"
HOUR_S = 3600.0
DAY_S = 86_400.0

Reader = Callable[[str], object]


def or_nothing(read: Reader) -> Reader:
    """Reads `none`, which takes a bound away, or a value."""

    def value(text: str) -> object:
        return None if text == NOTHING else read(text)

    value.__name__ = read.__name__
    return value


FIELDS: Mapping[str, tuple[Reader, str]] = MappingProxyType(
    {
        "--weight": (float, "its share beside the others'"),
        "--priority": (str, "interactive, standard or batch"),
        "--max-n": (or_nothing(int), "completions of one prompt"),
        "--max-tokens": (or_nothing(int), "of one completion"),
        "--cache-group": (or_nothing(str), "whose members share cached prefixes"),
    }
)
LIMITS: Mapping[str, tuple[Reader, str]] = MappingProxyType(
    {
        "--requests-per-minute": (or_nothing(int), "begun in any minute"),
        "--tokens-per-minute": (or_nothing(int), "of prompts and completions"),
        "--max-in-flight": (or_nothing(int), "requests at once"),
        "--max-in-flight-tokens": (or_nothing(int), "tokens at once"),
        "--budget-per-day": (or_nothing(float), "in the currency of the prices"),
        "--budget-per-month": (or_nothing(float), "in the currency of the prices"),
    }
)
LISTS: Mapping[str, str] = MappingProxyType(
    {
        "--models": "patterns of models that it may use: base, base:adapter, base:*, *",
        "--cors-origins": "web pages that may call with its keys",
    }
)


def add_tenancy(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands with their own."""
    _add_tenants(commands.add_parser("tenants", help="say which teams may use the service, and how much of it"))
    _add_keys(commands.add_parser("keys", help="make, exchange and revoke the keys of tenants"))
    usage = _with_store(commands.add_parser("usage", help="say who used what, and what it cost"))
    usage.add_argument(
        "--by", default="tenant,model,day", help="of tenant,model,adapter,key_id,day; default: %(default)s"
    )
    usage.add_argument("--tenant", help="of this one alone")
    usage.add_argument("--since", help="from this day on, like 2026-11-22")
    usage.add_argument("--until", help="to this day, which is included")
    usage.add_argument("--csv", action="store_true", help="as comma-separated values")


def field_of(flag: str) -> str:
    """The name under which a flag's value is kept."""
    return flag.removeprefix("--").replace("-", "_")


def _add_tenants(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (("add", "add a tenant"), ("set", "change what is said and nothing else")):
        action = _with_store(actions.add_parser(name, help=text))
        action.add_argument("name")
        for flag, (read, about) in {**FIELDS, **LIMITS}.items():
            action.add_argument(flag, type=read, default=argparse.SUPPRESS, help=about)
        for flag, about in LISTS.items():
            action.add_argument(flag, nargs="*", default=argparse.SUPPRESS, help=about)
    _with_store(actions.add_parser("list", help="list the tenants"))
    _with_store(actions.add_parser("remove", help="remove a tenant with its keys")).add_argument("name")
    apply = _with_store(actions.add_parser("apply", help="let the tenants of a file be all there are"))
    apply.add_argument("tenants_file", nargs="?", default="tenants.yaml", help="default: %(default)s")
    apply.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")


def _add_keys(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = _with_store(actions.add_parser("create", help="make a key, which is shown this once"))
    whose = create.add_mutually_exclusive_group(required=True)
    whose.add_argument("tenant", nargs="?", help="whose key it is")
    whose.add_argument("--admin", action="store_true", help="for /admin and /metrics, and for no model")
    create.add_argument("--scopes", nargs="+", help="infer, adapters:write, metrics, admin; default: infer")
    create.add_argument("--days", type=float, help="that it is good for; default: until it is revoked")
    rotate = _with_store(actions.add_parser("rotate", help="make a key in the place of another"))
    rotate.add_argument("id")
    rotate.add_argument(
        "--overlap-hours", type=float, default=24.0, help="the old one stays good; default: %(default)s"
    )
    _with_store(actions.add_parser("revoke", help="let a key be good for nothing")).add_argument("id")
    _with_store(actions.add_parser("list", help="list keys, none of which can be read")).add_argument("--tenant")


def _with_store(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--file", default="cluster.yaml", help="whose router names the store; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="answer as /admin does")
    return parser
