"""Forms of names: models, adapters with their scales, and samplers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from serve_app.api.error_text import nearest
from serve_app.api.forms.form import TOKEN_ID, Real, Terms, Text, Value, integral, is_token_id
from serve_app.api.forms.schema import OBJECT, Schema, array, either, nullable, record, string
from serve_app.core.names import MAX_SCALE
from serve_app.core.request import TEMPERATURE_FIRST as SAMPLERS
from serve_app.core.request import SamplerName

NAME = Text(min_chars=1, max_chars=lambda terms: terms.limits.max_model_chars)


class ModelNames:
    """One name, or a list of them."""

    def words(self, terms: Terms) -> str:
        return f"{NAME.words(terms)}, or a list of 1 to {terms.limits.max_models} of them"

    def schema(self, terms: Terms) -> Schema:
        return either(NAME.schema(terms), array(NAME.schema(terms), least=1, most=terms.limits.max_models))

    def read(self, value: Value) -> str | tuple[str, ...]:
        if isinstance(value.sent, str):
            return NAME.read(value)
        elements = value.elements(value.terms.limits.max_models, self.words(value.terms), is_needed=True)
        return tuple(NAME.read(value.part(at, element)) for at, element in enumerate(elements))


SCALE = Real(low=-MAX_SCALE, high=MAX_SCALE)


class AdapterNames:
    """One name for all prompts, or one or null for each; that there are as many is seen beside the prompts."""

    def words(self, terms: Terms) -> str:
        return (
            "the name of an adapter, or a list with one name or null for each prompt, at most"
            f" {terms.limits.max_prompts} in all"
        )

    def schema(self, terms: Terms) -> Schema:
        name = string(least=1)
        return either(name, array(nullable(name), most=terms.limits.max_prompts))

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


ADAPTER = Text(
    min_chars=1, max_chars=NAME.max_chars, kind="the name of an adapter, or a mix such as name*0.7+name*0.3,"
)


class AdapterScales:
    """Adapters by their number in the model's list, each with how much of it; those that are not there have 0."""

    def words(self, terms: Terms) -> str:
        return (
            f'a list of at most {terms.limits.max_n} objects with "id", the number of an adapter, and "scale", from'
            f" -{MAX_SCALE:g} to {MAX_SCALE:g}"
        )

    def schema(self, terms: Terms) -> Schema:
        element = record({"id": TOKEN_ID, "scale": SCALE.schema(terms)}, is_closed=True)
        return either(array(element, most=terms.limits.max_n), {**OBJECT, "maxProperties": 0})

    def read(self, value: Value) -> tuple[tuple[int, float], ...]:
        """Return pairs of a number and a scale, as they were sent."""
        if value.sent == {}:
            return ()
        elements = value.elements(value.terms.limits.max_n, self.words(value.terms))
        return tuple(_scale(value, at, element) for at, element in enumerate(elements))


def _scale(value: Value, at: int, element: object) -> tuple[int, float]:
    if not (isinstance(element, dict) and set(element) == {"id", "scale"}):
        raise value.part_refused(at, 'an object with "id" and "scale"', element)
    number = integral(element["id"])
    if not is_token_id(number):
        raise value.part_refused(at, 'an object whose "id" is the number of an adapter', element)
    return number, SCALE.read(replace(value, name=f"{value.name}[{at}].scale", sent=element["scale"]))


SAMPLER_NAMES: Mapping[str, SamplerName] = {
    **{name: name for name in SAMPLERS},
    "typical_p": "typ_p",
    "temp": "temperature",
}
MAX_SAMPLERS = 32
MAX_NAME_CHARS = 64
LOGIT_EDITS = frozenset({"penalties", "dry"})


class Samplers:
    """A list of names; those that edit logits come before all others. Another system's samplers are told as ignored."""

    def words(self, terms: Terms) -> str:
        return f"a list of these names, each at most once, others being ignored: {', '.join(SAMPLERS)}"

    def schema(self, terms: Terms) -> Schema:
        return {**array({"enum": list(SAMPLER_NAMES)}), "uniqueItems": True}

    def read(self, value: Value) -> tuple[SamplerName, ...]:
        names: list[SamplerName] = []
        for at, element in enumerate(value.elements(MAX_SAMPLERS, self.words(value.terms))):
            name = SAMPLER_NAMES.get(element) if isinstance(element, str) else None
            if name is None:
                if not isinstance(element, str) or len(element) > MAX_NAME_CHARS or nearest(element, SAMPLERS):
                    raise value.part_refused(at, f"one of {', '.join(SAMPLERS)}, or another system's name", element)
                value.ignore(element)
                continue
            if name in names:
                raise value.part_refused(at, "a name that does not stand before", element)
            if name in LOGIT_EDITS and not LOGIT_EDITS.issuperset(names):
                raise value.part_refused(at, "before every sampler but penalties and dry", element)
            names.append(name)
        return tuple(names)
