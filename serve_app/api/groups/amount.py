"""How much is generated, and what is done where it does not fit."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel

from serve_app.api.forms.form import Parameter
from serve_app.api.forms.numbers import Integer
from serve_app.api.forms.plain import OneOf
from serve_app.api.forms.shared import COMPLETIONS, COUNT, FLAG, LENGTH


class Amount(BaseModel):
    """How many completions of which length, and what gives way where the context is short.

    best_of: None ranks nothing
    """

    n: Annotated[int, Parameter(COMPLETIONS, "Completions returned for each prompt.")] = 1
    best_of: Annotated[
        int | None, Parameter(COMPLETIONS, "Completions compared for each prompt, of which the best are returned.")
    ] = None
    max_tokens: Annotated[int, Parameter(LENGTH, "Tokens generated at most.")] = 16
    min_tokens: Annotated[int, Parameter(COUNT, "Tokens generated at least, before anything ends the text.")] = 0
    truncate_sequence: Annotated[
        bool, Parameter(FLAG, "A prompt that leaves no room in the context loses its beginning.")
    ] = False
    truncate_prompt_tokens: Annotated[
        int | None,
        Parameter(
            Integer(low=-1, besides="; -1 is what `max_tokens` leaves of the context, 0 no bound", read_as={0: None}),
            "Tokens of a prompt that are kept.",
        ),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"],
        Parameter(OneOf("left", "right"), "Where a prompt loses what `truncate_prompt_tokens` does not keep."),
    ] = "left"
    context_length_exceeded_behavior: Annotated[
        Literal["truncate", "error"],
        Parameter(
            OneOf("truncate", "error"), "Whether a completion that does not fit the context is shortened or refused."
        ),
    ] = "truncate"
