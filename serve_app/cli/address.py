"""Where a cluster file's service is reached from the machine it runs on."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.tenants.keys import DEFAULT_PEPPER

EVERY_INTERFACE = {str(ipaddress.IPv4Address(0)): "127.0.0.1", str(ipaddress.IPv6Address(0)): "::1"}
"""Loopback by what a file binds to every interface."""
CONNECT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host and its port; as text, the URL."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def is_taken(self) -> bool:
        """Whether anything listens there."""
        try:
            with socket.create_connection((self.host, self.port), timeout=CONNECT_TIMEOUT_S):
                return True
        except TimeoutError:
            return True  # too busy to be accepted, which takes a listener
        except (OSError, OverflowError):  # no such port can be asked
            return False


def address_of(file: str, port: int | None = None) -> Address:
    """Return where the file's service is reached; what the file does not say is Serve's default.

    port: in the place of the file's own
    """
    options = read_cluster_file(Path(file)).get("http_options")
    options = options if isinstance(options, dict) else {}
    host, written = str(options.get("host", "127.0.0.1")), str(options.get("port"))
    port = port or (int(written) if written.isdecimal() else 8000)
    return Address(host=EVERY_INTERFACE.get(host, host), port=port)


def read_cluster_file(file: Path) -> dict[str, Any]:
    """Return the file's content; empty where it cannot be read or is no mapping."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def args_of(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the `args` of each application of a cluster file, whatever its shape."""
    applications = content.get("applications")
    for each in applications if isinstance(applications, list) else ():
        args = each.get("args") if isinstance(each, dict) else None
        if isinstance(args, dict):
            yield args


def store_of(content: Mapping[str, Any]) -> tuple[str, Path] | None:
    """Return the URL of the store of tenants that a cluster file names, and its pepper's file; None without one."""
    for args in args_of(content):
        if args.get("store"):
            return str(args["store"]), Path(str(args.get("pepper") or DEFAULT_PEPPER))
    return None
