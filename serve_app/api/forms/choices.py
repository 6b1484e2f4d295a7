"""Texts of which the whole completion is to be one."""

from __future__ import annotations

import json
from dataclasses import dataclass

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.core.errors import InvalidRequest
from serve_app.core.request import Constraint


@dataclass(frozen=True, slots=True)
class Choices:
    """A list of strings, none of them empty; of no strings nothing could be said."""

    def words(self, terms: Terms) -> str:
        most = terms.limits.max_constraint_chars
        return f"a list of one or more non-empty strings, of at most {most} characters together"

    def schema(self, terms: Terms) -> Schema:
        one = {"type": "string", "minLength": 1, "maxLength": terms.limits.max_constraint_chars}
        return {"type": "array", "items": one, "minItems": 1}

    def read(self, value: Value) -> Constraint:
        if not isinstance(value.sent, list) or not value.sent:
            raise value.refused(self.words(value.terms))
        found: list[str] = []
        for at, element in enumerate(value.sent):
            if not (isinstance(element, str) and element):
                raise value.part_refused(at, "a non-empty string", element)
            found.append(element)
        num_chars, most = sum(map(len, found)), value.terms.limits.max_constraint_chars
        if num_chars > most:
            must = f"have at most {most} characters together"
            raise InvalidRequest.refusing(value.name, must=must, found=str(num_chars))
        return Constraint(kind="choice", source=json.dumps(found, ensure_ascii=False), name=value.name)
