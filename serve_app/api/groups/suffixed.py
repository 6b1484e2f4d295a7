"""What comes behind the completion."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, InstanceOf

from serve_app.api.forms.form import Parameter
from serve_app.api.forms.plain import OneOf, Text
from serve_app.core.prompt import Infill, SuffixMode


class Suffixed(BaseModel):
    """A text behind every completion.

    suffix_mode: None leaves it to dialect and model; where the model is known it is settled
    gap:         of a body that is about a gap alone
    """

    suffix: Annotated[
        str | None,
        Parameter(
            Text(max_chars=lambda terms: terms.limits.max_prompt_chars),
            "The text behind the completion: what the completion joins with, or what is appended to it; empty is none.",
        ),
    ] = None
    suffix_mode: Annotated[
        InstanceOf[SuffixMode] | None,
        Parameter(
            OneOf("fim", "append", read_as=SuffixMode),
            "Whether `suffix` is told to the model, which fills the gap before it, or is appended.",
        ),
    ] = None
    gap: Annotated[InstanceOf[Infill] | None, Field(exclude=True, repr=False)] = None

    @property
    def infill(self) -> Infill | None:
        """The gap that the model is asked to fill, if any."""
        if self.gap is not None:
            return self.gap
        return Infill(suffix=self.suffix) if self.suffix and self.suffix_mode is SuffixMode.FIM else None
