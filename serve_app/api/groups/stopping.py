"""What ends a text."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from serve_app.api.forms.form import Parameter
from serve_app.api.forms.shared import FLAG, PATTERNS, STOPS
from serve_app.api.forms.tokens import TokenIds


class Stopping(BaseModel):
    """Strings, tokens and patterns that end a text."""

    stop: Annotated[tuple[str, ...], Parameter(STOPS, "Ends the text before the first of these strings.")] = ()
    stop_token_ids: Annotated[tuple[int, ...], Parameter(TokenIds(), "Ends the text at any of these tokens.")] = ()
    stop_regex: Annotated[
        tuple[str, ...], Parameter(PATTERNS, "Ends the text where one of these patterns matches.")
    ] = ()
    no_stop_trim: Annotated[bool, Parameter(FLAG, "What ended the text stays in it.")] = False
    ignore_eos: Annotated[bool, Parameter(FLAG, "The model's own end of text does not end it.")] = False
