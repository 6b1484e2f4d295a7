"""The tables of docs/contract.md, from what the service itself answers at /v1/dialects and from the tree of errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from serve_app.api.dialects import DIALECTS, UNION, Dialect, error_status
from serve_app.api.embeddings import EMBEDDINGS
from serve_app.api.forms.form import Parameter, Terms
from serve_app.api.limits import DEFAULT_LIMITS
from serve_app.api.listings import dialects_body
from serve_app.api.native import INFILL
from serve_app.api.parameters import NotYet
from serve_app.api.paths import Path
from serve_app.api.responding import CHATS_NAMES, NOT_HERE, OWN
from serve_app.api.scoring import CLASSIFY, RERANK, SCORE
from serve_app.api.tokenize import APPLY_TEMPLATE, DETOKENIZE, TOKENIZE
from serve_app.core.errors import ServeError
from tests.docs.docstrings import told_of
from tests.docs.markdown import code, codes, table
from tests.flow.prose import told

TOLD_ELSEWHERE = frozenset(
    {
        "name", "defaults", "statuses",  # have tables of their own
        "takes_zero_tokens", "takes_unlimited_tokens", "max_stop_strings",  # are ranges
        "max_logprobs", "max_n", "max_top_k",  # so are these
    }
)  # fmt: skip
"""Fields of a dialect that are no rows of the table of meanings."""

NAMED_OPTION = re.compile(r"^(\w+): .*")
"""An option that says behind its name what it means."""


@cache
def bodies() -> Mapping[str, Mapping[str, Any]]:
    """What GET /v1/dialects answers, by dialect."""
    answer = dialects_body(default=UNION, of_models={})
    assert isinstance(answer["data"], list)
    return {body["name"]: body for body in answer["data"]}


def carried() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Parameters that are read, as they are in `union`."""
    for name, body in bodies()["union"]["parameters"].items():
        if body["disposition"] == "carried":
            yield name, body


def names_of(name: str) -> list[str]:
    """Other names of a parameter."""
    return [other for other, body in bodies()["union"]["parameters"].items() if body.get("to") == name]


def parameters() -> str:
    """Every parameter that is read: name, other names, values, default, meaning."""
    defaults = bodies()["union"]["defaults"]
    rows = []
    for name, body in carried():
        default = code(shown(defaults[name])) if name in defaults else "–"
        rows.append([code(name), codes(names_of(name)) or "–", body["allowed"], default, _about(body)])
    return table(["parameter", "other names", "must be", "default", "what it does"], rows)


def names() -> str:
    """What other names do beside naming."""
    found = bodies()["union"]["parameters"].items()
    return "".join(f"* {code(name)}: {body['besides']}\n" for name, body in found if body.get("besides"))


def defaults() -> str:
    """Defaults that are not the same in every dialect."""
    every = bodies()["union"]["defaults"]
    rows = [
        [code(name), *(shown(bodies()[dialect]["defaults"][name]) for dialect in DIALECTS)]
        for name in every
        if len({shown(bodies()[dialect]["defaults"][name]) for dialect in DIALECTS}) > 1
    ]
    return table(["parameter", *DIALECTS], rows)


def ranges() -> str:
    """Values that are not the same in every dialect."""
    rows = []
    for name, body in carried():
        others: dict[str, list[str]] = {}
        for dialect in DIALECTS:
            allowed = bodies()[dialect]["parameters"][name]["allowed"]
            if allowed != body["allowed"]:
                others.setdefault(allowed, []).append(dialect)
        rows += [[code(name), ", ".join(dialects), allowed] for allowed, dialects in others.items()]
    return table(["parameter", "dialects", "must be"], rows)


def meanings() -> str:
    """Meanings and habits that are not the same in every dialect."""
    wanted = [field.name for field in fields(Dialect) if field.name not in TOLD_ELSEWHERE]
    told = told_of(Dialect, [field.name for field in fields(Dialect)])
    rows = []
    for name in wanted:
        values = [NAMED_OPTION.sub(r"\1", shown(bodies()[dialect]["meanings"][name])) for dialect in DIALECTS]
        if len(set(values)) > 1:
            about = re.sub(r"\bNone\b", "null", told.get(name, ""))
            rows.append([f"{code(name)}: {about}", *values])
    return table(["meaning", *DIALECTS], rows)


def refused() -> str:
    """Parameters that would change an answer and are not carried out, by the values that change nothing."""
    by_neutral: dict[tuple[str, str], list[str]] = {}
    for name, body in bodies()["union"]["parameters"].items():
        if body["disposition"] == "refused":
            neutral = codes(json.dumps(value) for value in body["neutral"] if value is not False)
            by_neutral.setdefault((neutral or "–", body["instead"]), []).append(name)
    rows = [[neutral, codes(sorted(names)), out] for (neutral, out), names in sorted(by_neutral.items())]
    return table(["neutral besides `null` and `false`", "parameters", "the way out"], rows)


def ignored() -> str:
    """Parameters that change no answer."""
    found = bodies()["union"]["parameters"].items()
    return codes(sorted(name for name, body in found if body["disposition"] == "ignored")) + ".\n"


def prose() -> str:
    """What a schema cannot say, rule by rule."""
    return "".join(f"* {rule}\n" for rule in told())


def chat() -> str:
    """Parameters of chats that are others than those of completions."""
    own = bodies()["union"]["chat"]
    rows = []
    for name, body in own["parameters"].items():
        default = code(shown(own["defaults"][name])) if name in own["defaults"] else "–"
        if body["disposition"] == "carried":
            rows.append([code(name), body["allowed"], default, _about(body)])
    refused = [name for name, body in own["parameters"].items() if body["disposition"] == "refused"]
    told = f"\n\nNo parameters of chats, and refused by name: {codes(refused)}.\n"
    return table(["parameter", "must be", "default", "what it does"], rows).rstrip("\n") + told


def tokenize() -> str:
    """Parameters of /tokenize, /apply-template and /detokenize."""
    return _of_routes({Path.TOKENIZE: TOKENIZE, Path.APPLY_TEMPLATE: APPLY_TEMPLATE, Path.DETOKENIZE: DETOKENIZE})


def infill() -> str:
    """Parameters that /infill has of its own."""
    return _of_routes({Path.INFILL: INFILL})


def _of_routes(tables: Mapping[Path, Mapping[str, Parameter]]) -> str:
    terms = Terms(limits=DEFAULT_LIMITS, dialect=UNION)
    rows = [
        [code(path), code(name), parameter.form.words(terms), parameter.about]
        for path, named in tables.items()
        for name, parameter in named.items()
    ]
    return table(["route", "parameter", "must be", "what it does"], rows)


def embeddings() -> str:
    """Parameters of /v1/embeddings."""
    terms = Terms(limits=DEFAULT_LIMITS, dialect=UNION)
    rows = [[code(name), parameter.form.words(terms), parameter.about] for name, parameter in EMBEDDINGS.items()]
    return table(["parameter", "must be", "what it does"], rows)


def scoring() -> str:
    """Parameters of /v1/rerank, /v1/score and /v1/classify."""
    return _of_routes({Path.V1_RERANK: RERANK, Path.V1_SCORE: SCORE, Path.V1_CLASSIFY: CLASSIFY})


def responses() -> str:
    """Parameters of /v1/responses that are others than those of chats, and those that are refused there."""
    terms = Terms(limits=DEFAULT_LIMITS, dialect=UNION)
    rows = [
        [
            code(name),
            parameter.form.words(terms),
            code(CHATS_NAMES[name]) if name in CHATS_NAMES else "–",
            parameter.about,
        ]
        for name, parameter in OWN.items()
    ]
    refused = [name for name, each in NOT_HERE.items() if isinstance(each, NotYet)]
    told = f"\n\nRefused by name: {codes(refused)}.\n"
    return table(["parameter", "must be", "in chats", "what it does"], rows).rstrip("\n") + told


def errors() -> str:
    """Every error: its code, type and status, the dialects with another status, and when it is told."""
    rows = []
    for each in error_classes():
        other = {
            name: error_status(each, dialect)
            for name, dialect in DIALECTS.items()
            if error_status(each, dialect) != each.status
        }
        elsewhere = ", ".join(f"{name} {status}" for name, status in other.items()) or "–"
        assert each.__doc__ is not None
        when = " ".join(each.__doc__.split("\n\n")[0].split())
        rows.append([str(each.status), code(each.code), code(each.type), elsewhere, when])
    return table(["status", "code", "type", "in other dialects", "when"], rows)


def error_classes() -> list[type[ServeError]]:
    """One class per code, by status; without the root, which nobody raises."""
    found: dict[str, type[ServeError]] = {}
    open_classes: list[type[ServeError]] = [ServeError]
    while open_classes:
        each = open_classes.pop(0)
        open_classes += each.__subclasses__()
        if each is not ServeError and each.__module__.startswith("serve_app."):
            found.setdefault(each.code, each)
    return sorted(found.values(), key=lambda each: (each.status, each.code))


def shown(value: object) -> str:
    """As JSON writes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _about(body: Mapping[str, Any]) -> str:
    return str(body.get("about", ""))
