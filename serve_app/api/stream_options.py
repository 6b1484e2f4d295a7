"""What a client may ask of a stream beside text."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict

from serve_app.api.forms.form import Parameter
from serve_app.api.forms.shared import FLAG


class StreamOptions(BaseModel):
    """What a stream reports beside text."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    include_usage: Annotated[bool, Parameter(FLAG, "One last chunk carries the usage of the whole response.")] = False
    continuous_usage_stats: Annotated[bool, Parameter(FLAG, "Every chunk carries the usage of its choice so far.")] = (
        False
    )
