"""Lists of what a service has: its models, its adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from serve_app.cli.client import Service, query
from serve_app.cli.screen import CommandFailed, Exit, console, is_watched, say, say_json, table

if TYPE_CHECKING:
    from serve_app.check.single import FolderReport


def list_models(service: Service, *, as_json: bool) -> int:
    """Every name that can be sent as `model`; a program reads one a line. Raises ServiceFailed."""
    models = service.models()
    if as_json:
        say_json(models)
    elif not is_watched():
        say("\n".join(str(each["id"]) for each in models))
    else:
        console().print(table(["model", "base", "context", "from"], map(_row, models)))
    return Exit.DONE


def list_adapters(service: Service, model: str | None, *, as_json: bool) -> int:
    """Those of one base, or of all, unusable ones with the reason. Raises ServiceFailed."""
    bases = [model] if model is not None else [str(each["id"]) for each in service.models() if not each.get("parent")]
    found = {base: service.json(query("/lora-adapters", model=base), member=None) for base in bases}
    if as_json:
        say_json(found)
        return Exit.DONE
    rows = [[str(each["name"]), str(each["id"]), str(each["path"])] for base in bases for each in found[base]]
    if not is_watched():
        say("\n".join(row[0] for row in rows))
    elif rows:
        console().print(table(["adapter", "number", "from"], rows))
    else:
        say("There is no adapter. `serve_app adapters check PATH` says whether a folder of one can be served.")
    return Exit.DONE


def _row(entry: dict[str, Any]) -> list[str]:
    return [
        str(entry["id"]),
        str(entry.get("parent") or ""),
        str(entry.get("max_model_len") or ""),
        str(entry.get("root") or ""),
    ]


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
