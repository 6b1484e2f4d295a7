"""Reads files of unknown origin: confined to a folder, of a bounded size, plain JSON."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from serve_app.catalog.errors import CatalogError


def confined_file(folder: Path, name: str, *, root: Path) -> Path:
    """Return the real path of the regular file `name` in `folder`.

    Raises CatalogError where there is none, or where links lead out of `root`.
    """
    path = folder / name
    real = path.resolve()
    if not real.is_relative_to(root.resolve()):
        raise CatalogError(f"{name} is a link that leads out of the folder")
    if not real.exists():
        raise CatalogError(f"{name} is missing")
    if not stat.S_ISREG(real.stat().st_mode):
        raise CatalogError(f"{name} is not a regular file")
    return real


def read_json_object(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """Read a JSON object. Raises CatalogError, which names the file, for anything else."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CatalogError(f"{path.name} is larger than {max_bytes} bytes")
    return parse_json_object(data, name=path.name)


def parse_json_object(data: bytes, *, name: str) -> dict[str, Any]:
    """Parse a JSON object strictly: UTF-8, no repeated keys, no NaN or Infinity."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except RecursionError:
        raise CatalogError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise CatalogError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CatalogError(f"{name} must hold a JSON object, found {type(value).__name__}")
    return value


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice")
        found[key] = value
    return found


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")
