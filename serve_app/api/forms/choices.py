"""Texts of which the whole completion is to be one."""

from __future__ import annotations

import json
from dataclasses import dataclass

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.core.constraint import Constraint
from serve_app.core.errors import InvalidRequest

MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class Choices:
    """A list of strings, none of them empty; the empty list is neutral."""

    def words(self, terms: Terms) -> str:
        most = terms.limits.max_constraint_chars
        return f"a list of at most {MAX_CHOICES} non-empty strings, {most} characters in all"

    def schema(self, terms: Terms) -> Schema:
        one = {"type": "string", "minLength": 1, "maxLength": terms.limits.max_constraint_chars // MAX_CHOICES}
        return {"type": "array", "items": one, "maxItems": MAX_CHOICES}

    def read(self, value: Value) -> Constraint | None:
        found: list[str] = []
        for at, element in enumerate(value.elements(MAX_CHOICES, self.words(value.terms))):
            if not (isinstance(element, str) and element):
                raise value.part_refused(at, "a non-empty string", element)
            found.append(element)
        num_chars, most = sum(map(len, found)), value.terms.limits.max_constraint_chars
        if num_chars > most:
            raise InvalidRequest.refusing(value.name, must=f"have at most {most} characters", found=str(num_chars))
        if not found:
            return None
        return Constraint(kind="choice", source=json.dumps(found, ensure_ascii=False), name=value.name)
