"""What a docstring says of each field: `name: text`, or `name, other: text` of several together."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from pydantic import BaseModel


def told_of(owner: type, names: Iterable[str]) -> dict[str, str]:
    """By name; fields of which the docstring says nothing are left out."""
    name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    head = re.compile(rf"(?<![\w.`])(?P<names>(?:{name})(?:, (?:{name}))*): ")
    told: dict[str, str] = {}
    for paragraph in (inspect.getdoc(owner) or "").split("\n\n"):
        text = " ".join(paragraph.split())
        heads = list(head.finditer(text))
        ends = [*(each.start() for each in heads[1:]), len(text)]
        for each, end in zip(heads, ends, strict=False):
            told |= dict.fromkeys(each["names"].split(", "), text[each.end() : end].strip().rstrip(";"))
    return told


def told_of_settings(model: type[BaseModel]) -> dict[str, str]:
    """What the classes that declare a model's fields say of them; a class's own words count most."""
    told: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if owner.__module__.startswith("serve_app."):
            told |= told_of(owner, model.model_fields)
    return told
