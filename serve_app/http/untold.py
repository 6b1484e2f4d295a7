"""What a proxy tells a router with the next request that it hands on: how many others it has refused meanwhile."""

from __future__ import annotations

from starlette.types import Scope

HEADER = b"x-serve-app-refused"
"""Between the two alone: of a client it is taken away."""


def tell(scope: Scope, num_refused: int) -> None:
    """Have this request say so."""
    told = [(HEADER, str(num_refused).encode())] if num_refused else []
    scope["headers"] = [*(each for each in scope["headers"] if each[0] != HEADER), *told]


def told(scope: Scope) -> int:
    """The refusals that this request tells of. Zero for what is no number: it came past every proxy."""
    values = [value for name, value in scope["headers"] if name == HEADER]
    return int(values[0]) if values and values[0].isdigit() and len(values[0]) < 10 else 0
