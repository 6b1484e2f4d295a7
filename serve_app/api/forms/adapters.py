"""Adapters that are named beside the model: by name for each prompt, or by number with a scale."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.api.forms.numbers import TOKEN_ID, integral, is_token_id
from serve_app.api.shown import shown
from serve_app.core.errors import UnsupportedParameter


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """One name for all prompts, or one or null for each; that there are as many is seen beside the prompts."""

    def words(self, terms: Terms) -> str:
        return (
            "the name of an adapter, or a list with one name or null for each prompt, at most"
            f" {terms.limits.max_prompts} in all"
        )

    def schema(self, terms: Terms) -> Schema:
        name = {"type": "string", "minLength": 1}
        names = {"type": "array", "items": {"anyOf": [name, {"type": "null"}]}, "maxItems": terms.limits.max_prompts}
        return {"anyOf": [name, names]}

    def read(self, value: Value) -> str | tuple[str | None, ...]:
        if isinstance(value.sent, str):
            if not value.sent:
                raise value.refused(self.words(value.terms))
            return value.sent
        elements = value.elements(value.terms.limits.max_prompts, self.words(value.terms))
        return tuple(_name(value, at, element) for at, element in enumerate(elements))


def _name(value: Value, at: int, name: object) -> str | None:
    if name is not None and not (isinstance(name, str) and name):
        raise value.part_refused(at, "the name of an adapter or null", name)
    return name


@dataclass(frozen=True, slots=True)
class AdapterScales:
    """Adapters by their number in the model's list; a scale of 1 switches one on."""

    def words(self, terms: Terms) -> str:
        return f'a list of at most {terms.limits.max_n} objects with "id" and "scale"'

    def schema(self, terms: Terms) -> Schema:
        element = {
            "type": "object",
            "properties": {"id": TOKEN_ID, "scale": {"enum": [0, 1]}},
            "required": ["id", "scale"],
            "additionalProperties": False,
        }
        none = {"type": "object", "maxProperties": 0}
        return {"anyOf": [{"type": "array", "items": element, "maxItems": terms.limits.max_n}, none]}

    def read(self, value: Value) -> tuple[tuple[int, float], ...]:
        """The adapters that are switched on.

        Raises UnsupportedParameter for a mixture and for a scale between 0 and 1.
        """
        if value.sent == {}:
            return ()
        elements = value.elements(value.terms.limits.max_n, self.words(value.terms))
        scales = [_scale(value, at, element) for at, element in enumerate(elements)]
        switched_on = tuple((number, scale) for number, scale in scales if scale)
        if len({number for number, _ in switched_on}) > 1:
            raise UnsupportedParameter.refusing(
                value.name, must="switch on one adapter at most", found=str(len(switched_on))
            )
        return switched_on


def _scale(value: Value, at: int, element: object) -> tuple[int, float]:
    if not (isinstance(element, dict) and set(element) == {"id", "scale"}):
        raise value.part_refused(at, 'an object with "id" and "scale"', element)
    number, scale = integral(element["id"]), element["scale"]
    if not is_token_id(number):
        raise value.part_refused(at, 'an object whose "id" is the number of an adapter', element)
    if type(scale) not in (int, float) or scale not in (0, 1):
        raise UnsupportedParameter.refusing(
            f"{value.name}[{at}].scale",
            must="be 0 or 1, as adapters are not scaled by this server",
            found=shown(scale),
        )
    return number, float(scale)
