"""What ends a text."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from serve_app.api.forms.form import Parameter
from serve_app.api.forms.numbers import Integer
from serve_app.api.forms.shared import FLAG, PATTERNS, STOPS
from serve_app.api.forms.tokens import TokenIds

INDENT = Integer(low=0, high=200)


class Stopping(BaseModel):
    """Strings, tokens and patterns that end a text."""

    stop: Annotated[tuple[str, ...], Parameter(STOPS, "Ends the text before the first of these strings.")] = ()
    stop_token_ids: Annotated[tuple[int, ...], Parameter(TokenIds(), "Ends the text at any of these tokens.")] = ()
    stop_regex: Annotated[
        tuple[str, ...], Parameter(PATTERNS, "Ends the text where one of these patterns matches.")
    ] = ()
    n_indent: Annotated[
        int, Parameter(INDENT, "Ends the text before a line that is indented by fewer spaces or tabs; 0 is off.")
    ] = 0
    t_max_predict_ms: Annotated[
        int,
        Parameter(
            Integer(low=-1, besides="; 0 and -1 are no limit", read_as={-1: 0}),
            "Ends the text at the first line break that comes so many milliseconds after its first token.",
        ),
    ] = 0
    no_stop_trim: Annotated[bool, Parameter(FLAG, "What ended the text stays in it.")] = False
    ignore_eos: Annotated[bool, Parameter(FLAG, "The model's own end of text does not end it.")] = False
