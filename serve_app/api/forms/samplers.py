"""The samplers of a chain by their names, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.core.request import SamplerName

SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
SAMPLER_NAMES: Mapping[str, SamplerName] = MappingProxyType({**{name: name for name in SAMPLERS}, "typical_p": "typ_p"})
LOGIT_EDITS = frozenset({"penalties", "dry"})


@dataclass(frozen=True, slots=True)
class Samplers:
    """A list of names; those that edit logits come before all others."""

    def words(self, terms: Terms) -> str:
        return f"a list of these names, each at most once: {', '.join(SAMPLERS)}"

    def schema(self, terms: Terms) -> Schema:
        return {"type": "array", "items": {"enum": list(SAMPLER_NAMES)}, "uniqueItems": True}

    def read(self, value: Value) -> tuple[SamplerName, ...]:
        names: list[SamplerName] = []
        for at, element in enumerate(value.elements(2 * len(SAMPLERS), self.words(value.terms))):
            name = SAMPLER_NAMES.get(element) if isinstance(element, str) else None
            if name is None:
                raise value.part_refused(at, f"one of {', '.join(SAMPLERS)}", element)
            if name in names:
                raise value.part_refused(at, "a name that does not stand before", element)
            if name in LOGIT_EDITS and not LOGIT_EDITS.issuperset(names):
                raise value.part_refused(at, "before every sampler but penalties and dry", element)
            names.append(name)
        return tuple(names)
