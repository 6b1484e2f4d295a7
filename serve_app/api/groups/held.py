"""What the text has to be; one of them at most."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, InstanceOf

from serve_app.api.forms.choices import Choices
from serve_app.api.forms.constraints import EBNF, REGEX, Grammar, JsonSchema, ResponseFormat
from serve_app.api.forms.form import Parameter
from serve_app.api.forms.structured import StructuredOutputs
from serve_app.core.request import Constraint


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
    guided_choice: Annotated[
        InstanceOf[Constraint] | None, Parameter(Choices(), "The text is one of these strings.")
    ] = None
    structured_outputs: Annotated[
        InstanceOf[Constraint] | None,
        Parameter(StructuredOutputs(), "What the text has to be: JSON, of an expression, one of a few, of a grammar."),
    ] = None

    @property
    def constraint(self) -> Constraint | None:
        """What the text has to be; None is any text."""
        sources = (getattr(self, name) for name in Held.model_fields)
        return next((source for source in sources if source is not None), None)
