"""How one process of ours runs a module in another, which finds the libraries of the first and no stranger's files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Where the package lies."""


def command(module: str, *words: str) -> list[str]:
    """What runs it; to be given `variables`."""
    return [sys.executable, "-P", "-m", module, *words]


def variables(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of it, else this process's or `base`.

    Of where this process looks for modules the working directory is left out, unless the package lies there: Ray has
    its workers look there before they look for libraries, and a file `json.py` would be taken for one.
    """
    left_out = _working_directory()
    found = [each for each in map(Path, filter(None, sys.path)) if each.resolve() != left_out or left_out == ROOT]
    own = [] if ROOT in found else [ROOT]
    return {**(os.environ if base is None else base), "PYTHONPATH": os.pathsep.join(map(str, [*found, *own]))}


def _working_directory() -> Path | None:
    try:
        return Path.cwd().resolve()
    except FileNotFoundError:  # it was deleted
        return None
