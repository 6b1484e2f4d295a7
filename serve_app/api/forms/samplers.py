"""The samplers of a chain by their names, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.api.spelling import nearest
from serve_app.core.request import SamplerName

SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
SAMPLER_NAMES: Mapping[str, SamplerName] = MappingProxyType(
    {**{name: name for name in SAMPLERS}, "typical_p": "typ_p", "temp": "temperature"}
)
MAX_SAMPLERS = 32
MAX_NAME_CHARS = 64
LOGIT_EDITS = frozenset({"penalties", "dry"})


@dataclass(frozen=True, slots=True)
class Samplers:
    """A list of names; those that edit logits come before all others. Another system's samplers are told as ignored."""

    def words(self, terms: Terms) -> str:
        return f"a list of these names, each at most once, others being ignored: {', '.join(SAMPLERS)}"

    def schema(self, terms: Terms) -> Schema:
        return {"type": "array", "items": {"enum": list(SAMPLER_NAMES)}, "uniqueItems": True}

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
