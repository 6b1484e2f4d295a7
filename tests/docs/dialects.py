"""The tables of docs/dialects: what becomes of each parameter that a system documents, and what its dialect decides."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from serve_app.api.dialects import DIALECTS, Dialect
from tests.docs.contract import bodies, shown
from tests.docs.docstrings import told_of
from tests.docs.markdown import code, codes, table
from tests.flow.documented import DOCUMENTED

PAGES_OF = {name: name.replace(".", "-") for name in DIALECTS if name != "union"}
"""The file of each dialect's page, without its ending."""


def parameters(system: str) -> str:
    """Every parameter that the system documents: what becomes of it, and its default here."""
    rows = []
    for name in DOCUMENTED[system].split():
        body = bodies()[system]["parameters"].get(name)
        if body is not None:
            rows.append([code(name), _fate(body), _default(system, body.get("to", name))])
    return table(["parameter", "here", "default"], rows)


def decisions(system: str) -> str:
    """What the dialect decides otherwise than `union`, which is spoken where none is named."""
    told = told_of(Dialect, [field.name for field in fields(Dialect)])
    ours, common = (bodies()[name] for name in (system, "union"))
    rows = [
        [f"{code(name)} where it was not sent", code(shown(value)), code(shown(common["defaults"][name]))]
        for name, value in ours["defaults"].items()
        if value != common["defaults"][name]
    ]
    for name, value in ours["meanings"].items():
        if value != common["meanings"][name]:
            about = re.sub(r"\bNone\b", "null", told.get(name, ""))
            rows.append([f"{code(name)}: {about}", _plainly(value), _plainly(common["meanings"][name])])
    rows += [[f"status of an error that is {code(name)} elsewhere", str(found), "–"] for name, found in _statuses(ours)]
    return table(["what", system, "union"], rows)


def _statuses(body: Mapping[str, Any]) -> list[tuple[str, int]]:
    return list(body["statuses"].items())


def sections() -> Mapping[str, Callable[[], str]]:
    """Who writes which section of which page."""
    found: dict[str, Callable[[], str]] = {}
    for system, page in PAGES_OF.items():
        found[f"{page}-parameters"] = partial(parameters, system)
        found[f"{page}-decisions"] = partial(decisions, system)
    return found


def _fate(body: Mapping[str, Any]) -> str:
    match body["disposition"]:
        case "carried":
            return f"Carried out. {body['about']}"
        case "ignored":
            return "Accepted and told as ignored, as it changes no answer."
        case "renamed":
            besides = f" {body['besides']}" if body.get("besides") else ""
            return f"Carried out as {code(body['to'])}.{besides}"
        case _:
            neutral = codes(json.dumps(value) for value in [None, *body["neutral"]])
            return f"A 400 that names it, unless it is {neutral}."


def _default(system: str, name: str) -> str:
    found = bodies()[system]["defaults"]
    return code(shown(found[name])) if name in found else "–"


def _plainly(value: object) -> str:
    words = {True: "yes", False: "no"}
    return words[value] if isinstance(value, bool) else re.sub(r"^(\w+): .*", r"\1", shown(value))
