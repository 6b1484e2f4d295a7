"""What of the computation itself is returned."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel

from serve_app.api.forms.form import Parameter
from serve_app.api.forms.plain import FlagOr
from serve_app.api.forms.shared import FLAG


class Recorded(BaseModel):
    """What SGLang returns beside a text, where the operator allows it."""

    return_hidden_states: Annotated[
        bool | Literal["last"],
        Parameter(FlagOr("last"), "What the last layer gave, for each token that was drawn or for the last alone."),
    ] = False
    return_routed_experts: Annotated[
        bool, Parameter(FLAG, "Which experts every token was sent to is returned, of models that have experts.")
    ] = False
