"""The models that a request is for: one, or a list of which each answers."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.api.forms.plain import Text

NAME = Text(min_chars=1, max_chars=lambda terms: terms.limits.max_model_chars)


@dataclass(frozen=True, slots=True)
class ModelNames:
    """One name, or a list of them."""

    def words(self, terms: Terms) -> str:
        return f"{NAME.words(terms)}, or a list of 1 to {terms.limits.max_models} of them"

    def schema(self, terms: Terms) -> Schema:
        names = {"type": "array", "items": NAME.schema(terms), "minItems": 1, "maxItems": terms.limits.max_models}
        return {"anyOf": [NAME.schema(terms), names]}

    def read(self, value: Value) -> str | tuple[str, ...]:
        if isinstance(value.sent, str):
            return NAME.read(value)
        allowed = self.words(value.terms)
        elements = value.elements(value.terms.limits.max_models, allowed)
        if not elements:
            raise value.refused(allowed)
        return tuple(
            NAME.read(Value(name=f"{value.name}[{at}]", sent=element, terms=value.terms))
            for at, element in enumerate(elements)
        )
