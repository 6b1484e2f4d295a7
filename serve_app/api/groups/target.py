"""With which model, and for whom."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from serve_app.api.forms.adapters import AdapterNames, AdapterScales
from serve_app.api.forms.form import Parameter
from serve_app.api.forms.numbers import Integer
from serve_app.api.forms.plain import Text
from serve_app.api.forms.shared import FLAG
from serve_app.api.limits import INT64_MAX

MAX_SALT_CHARS = 1024


class Target(BaseModel):
    """The model that a body names, with its adapters, and whom it speaks for."""

    model: Annotated[
        str,
        Parameter(
            Text(min_chars=1, max_chars=lambda terms: terms.limits.max_model_chars),
            "A base model, an adapter as `base:adapter`, or an alias.",
        ),
    ]
    lora_path: Annotated[
        str | tuple[str | None, ...] | None,
        Parameter(AdapterNames(), "An adapter of the model for all prompts, or for each."),
    ] = None
    lora: Annotated[
        tuple[tuple[int, float], ...],
        Parameter(AdapterScales(), "An adapter of the model by its number at /lora-adapters."),
    ] = ()
    user: Annotated[
        str | None, Parameter(Text(), "Names the end user for abuse reports; the completion is the same.")
    ] = None
    cache_prompt: Annotated[bool, Parameter(FLAG, "Whether prefixes computed before may be used.")] = True
    cache_salt: Annotated[
        str,
        Parameter(
            Text(max_chars=lambda terms: MAX_SALT_CHARS),
            "Prefixes are shared among requests of the same salt and with no other.",
        ),
    ] = ""
    priority: Annotated[
        int,
        Parameter(Integer(low=-INT64_MAX - 1, high=INT64_MAX), "Every request is as urgent as any other."),
    ] = 0
