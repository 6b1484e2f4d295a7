"""Types of settings with their bounds: dataclasses declare them, and whoever reads a file checks them."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Lt

PositiveInt = Annotated[int, Gt(0)]
Count = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
Part = Annotated[float, Gt(0), Lt(1)]
Amount = Annotated[float, Ge(0)]
