"""What the text has to be; one of them at most."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, InstanceOf

from serve_app.api.forms.constraints import EBNF, REGEX, Grammar, JsonSchema, ResponseFormat
from serve_app.api.forms.form import Parameter
from serve_app.core.constraint import Constraint


class Held(BaseModel):
    """The sources of a constraint."""

    response_format: Annotated[
        InstanceOf[Constraint] | None,
        Parameter(ResponseFormat(), "What the text has to be: any text, JSON, JSON of a schema, or of a grammar."),
    ] = None
    grammar: Annotated[
        InstanceOf[Constraint] | None, Parameter(Grammar(), "A grammar that the text has to follow.")
    ] = None
    json_schema: Annotated[
        InstanceOf[Constraint] | None, Parameter(JsonSchema(), "The text is JSON that satisfies this schema.")
    ] = None
    regex: Annotated[InstanceOf[Constraint] | None, Parameter(REGEX, "What the whole text has to match.")] = None
    ebnf: Annotated[InstanceOf[Constraint] | None, Parameter(EBNF, "A grammar that the text has to follow.")] = None
