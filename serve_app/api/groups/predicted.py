"""What the client expects the completion to be."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from serve_app.api.forms.form import Parameter
from serve_app.api.forms.predictions import Prediction, Speculation


class Predicted(BaseModel):
    """A hint that changes no completion, but what it takes: tokens that were expected are computed several at once."""

    prediction: Annotated[
        str | None,
        Parameter(Prediction(), "What the completion is expected to be, most of it; where it is, it comes faster."),
    ] = None
    speculation: Annotated[
        str | tuple[int, ...] | None,
        Parameter(Speculation(), "The same as text or token ids alone."),
    ] = None

    @property
    def expected(self) -> str | tuple[int, ...]:
        """Text or token ids; empty where nothing is expected."""
        return self.prediction or self.speculation or ""
