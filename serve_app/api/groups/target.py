"""With which model, and for whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from serve_app.api.forms.adapters import AdapterName, AdapterNames, AdapterScales
from serve_app.api.forms.form import Parameter
from serve_app.api.forms.models import ModelNames
from serve_app.api.forms.plain import Text
from serve_app.api.forms.shared import FLAG

MAX_SALT_CHARS = 1024


class Target(BaseModel):
    """The models that a body names, with their adapters, and whom it speaks for.

    model:  the name as the response has it: of a list of models, all names with commas between them
    listed: the names of a list; where one name was sent, none
    """

    model: Annotated[
        str,
        Parameter(
            ModelNames(),
            "A base model, an adapter as `base:adapter`, a mix as `base:name*0.7+name*0.3`, or an alias; of a list each"
            " answers.",
        ),
    ]
    listed: Annotated[tuple[str, ...], Field(exclude=True, repr=False)] = ()
    lora_path: Annotated[
        str | tuple[str | None, ...] | None,
        Parameter(AdapterNames(), "An adapter of the model for all prompts, or for each."),
    ] = None
    lora: Annotated[
        tuple[tuple[int, float], ...],
        Parameter(AdapterScales(), "Adapters of the model by their numbers at /lora-adapters, and how much of each."),
    ] = ()
    adapter: Annotated[
        str | None, Parameter(AdapterName(), "An adapter of the model, which must not select another one.")
    ] = None
    user: Annotated[
        str | None, Parameter(Text(), "Names the end user in the service's log; the completion is the same.")
    ] = None
    cache_prompt: Annotated[bool, Parameter(FLAG, "Whether prefixes computed before may be used.")] = True
    cache_salt: Annotated[
        str,
        Parameter(
            Text(max_chars=lambda terms: MAX_SALT_CHARS),
            "What is kept of prefixes, images and constraints is shared by requests of the same salt and no other.",
        ),
    ] = ""

    @model_validator(mode="before")
    @classmethod
    def _join(cls, values: Any) -> Any:
        """A list of models is kept as it was sent beside the name that it has in the response."""
        if isinstance(values, dict) and isinstance(values.get("model"), tuple):
            return {**values, "model": ",".join(values["model"]), "listed": values["model"]}
        return values

    @property
    def scales(self) -> Mapping[int, float]:
        """What `lora` switches on, by number; of a number that comes twice the last scale counts."""
        return {number: scale for number, scale in dict(self.lora).items() if scale}

    @property
    def models(self) -> tuple[str, ...]:
        """Every name that answers."""
        return self.listed or (self.model,)
