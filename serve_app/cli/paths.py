"""Looks at folders of models and adapters before they are served, and tells what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from serve_app.cli.exits import CommandFailed, Exit
from serve_app.cli.screen import say, say_json

if TYPE_CHECKING:
    from serve_app.check.single import FolderReport

GIB = 1 << 30
NEXT = "Serve it: set `path` in the args of an application of cluster.yaml, then `serve_app check`."
NEXT_ADAPTER = "Serve it: put the folder below what `adapters` names in cluster.yaml, then start the service again."


def check_model_path(path: str, *, dtype: str, as_json: bool) -> int:
    """0 where the model can be served."""
    from serve_app.check.single import check_model_folder

    return _told([check_model_folder(path, dtype=dtype)], NEXT, as_json=as_json)


def check_adapter_path(path: str, model: str | None, *, as_json: bool) -> int:
    """0 where every adapter there can be served. Raises CommandFailed where there is none."""
    from serve_app.catalog.files import CatalogError
    from serve_app.check.single import check_adapters

    try:
        reports = check_adapters(path, model)
    except CatalogError as error:
        raise CommandFailed(f"{error}.") from error
    return _told(reports, NEXT_ADAPTER, as_json=as_json)


def _told(reports: Sequence[FolderReport], then: str, *, as_json: bool) -> int:
    is_sound = all(each.reason is None for each in reports)
    if as_json:
        say_json([asdict(each) for each in reports])
        return Exit.DONE if is_sound else Exit.FAILED
    for each in reports:
        told = ", ".join(_fact(name, value) for name, value in each.facts.items() if value != {})
        say(f"{each.name}: OK, {told}" if each.reason is None else f"{each.name}: cannot be served: {each.reason}")
        for note in each.notes:
            say(f"{each.name}: note: {note}")
    if is_sound:
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
