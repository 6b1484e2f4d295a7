"""Lists of what a service has: its models, its adapters."""

from __future__ import annotations

from typing import Any

from serve_app.cli.client import Service, query
from serve_app.cli.exits import Exit
from serve_app.cli.screen import console, is_watched, say, say_json, table


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
