"""Parameters of requests as options, made of the table that the service itself reads requests by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from serve_app.cli.offering import Offer, said
from serve_app.cli.screen import CommandFailed, Exit

OWN = frozenset({"model", "prompt", "messages", "stream", "stream_options"})
"""Said by the commands themselves."""
USUAL = frozenset(
    {
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "logprobs", "echo", "suffix",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "json_schema", "regex", "grammar", "tools",
        "tool_choice", "best_of", "logit_bias",
    }
)  # fmt: skip
PANELS: Mapping[str, str] = {
    "Sampling": "Sampling",
    "Amount": "How much",
    "Stopping": "Where it ends",
    "Shown": "What is shown",
    "Held": "What the text has to be",
    "Calling": "Tools",
    "Target": "Models and adapters",
    "Conversed": "Chats",
}
"""By the class that declares a group; smaller groups share one."""
OTHERS = "Others"
METAVARS = {"integer": "INTEGER", "number": "NUMBER", "array": "JSON", "object": "JSON", "string": "TEXT"}
ANOTHER_NAME = "Another name of "


def parameters_of(context: typer.Context, assignments: Sequence[str] | None, *, kind: str) -> dict[str, object]:
    """Return what was said of a table's options, and of `name=json` under any name, as a request has it.

    Raises CommandFailed for a name that is nobody's or the command's own, and for what no value of a parameter can be.
    """
    options = said(context)
    if not options and not assignments:
        return {}
    schemas = _schemas(kind)
    found = {name: _value(name, value, schemas[name]) for name, value in options.items()}
    for each in assignments or ():
        name, sign, text = each.partition("=")
        if not sign:
            raise CommandFailed(f"--set {each}: write --set name=value, as in --set top_k=40.", Exit.MISUSED)
        if name in OWN:
            raise CommandFailed(f"--set {each}: the command says {name!r} itself; see --help.", Exit.MISUSED)
        if name not in schemas:
            raise CommandFailed(f"--set {each}: {_unknown(name, tuple(schemas))}", Exit.MISUSED)
        found[name] = _value(name, text, schemas[name])
    return found


def offers(kind: str) -> list[Offer]:
    """Return the options of POST /v1/completions, or of /v1/chat/completions for ChatRequest."""
    panels = _panels()
    return [
        Offer(
            name=name,
            about=_about(schema),
            metavar=_metavar(schema),
            is_switch=_kinds(schema) == {"boolean"},
            is_usual=name in USUAL,
            panel=panels.get(name, OTHERS),
        )
        for name, schema in _schemas(kind).items()
        if name not in OWN and not _is_of_no_use(schema)
    ]


def _schemas(kind: str) -> Mapping[str, Any]:
    """Return the parameters by name, as the service describes them."""
    from serve_app.api.dialects import UNION
    from serve_app.api.forms.form import Terms
    from serve_app.api.limits import DEFAULT_LIMITS
    from serve_app.api.openapi import body_schema
    from serve_app.api.parse import CHAT, COMPLETION

    terms = Terms(limits=DEFAULT_LIMITS, dialect=UNION)
    schema = body_schema(CHAT if kind == "ChatRequest" else COMPLETION, terms)
    found: Mapping[str, Any] = schema["properties"]
    return found


def _panels() -> dict[str, str]:
    """Return the panel of each parameter, by the group that declares it."""
    from serve_app.api.chat import ChatRequest
    from serve_app.api.parameters import declared

    found: dict[str, str] = {}
    for group in ChatRequest.__mro__:
        if group.__name__ in PANELS:
            found |= dict.fromkeys(declared(group), PANELS[group.__name__])
    return found


def _is_of_no_use(schema: Mapping[str, Any]) -> bool:
    about = schema.get("description", "")
    return "enum" in schema or about.startswith(ANOTHER_NAME)


def _about(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    told = "" if default in (None, "", [], {}, False) else f" Usually {json.dumps(default, ensure_ascii=False)}."
    return f"{schema['description']}{told}"


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of a parameter's values, null left out."""
    found: set[str] = set()
    for each in schema.get("anyOf") or [schema]:
        kind = each.get("type", "string" if "enum" in each else "object")
        found |= {kind} if isinstance(kind, str) else set(kind)
    return found - {"null"}


def _metavar(schema: Mapping[str, Any]) -> str:
    kinds = _kinds(schema)
    return METAVARS[kinds.pop()] if len(kinds) == 1 and kinds < METAVARS.keys() else "TEXT|JSON"


def _value(name: str, value: object, schema: Mapping[str, Any]) -> object:
    """Read a text as JSON where the parameter may be something else than a text."""
    kinds = _kinds(schema)
    if not isinstance(value, str) or kinds == {"string"}:
        return value
    try:
        return json.loads(value)
    except ValueError:
        if "string" in kinds:
            return value
        wanted = " or ".join(sorted(kinds))
        raise CommandFailed(f"--{name.replace('_', '-')}: {value!r} is no {wanted} in JSON.", Exit.MISUSED) from None


def _unknown(name: str, known: tuple[str, ...]) -> str:
    from serve_app.api.error_text import nearest

    near = nearest(name, known)
    hint = "" if near is None else f" Did you mean {near!r}?"
    return f"there is no parameter {name!r}.{hint} `serve_app complete --help-all` lists them."
