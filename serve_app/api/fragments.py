"""JSON that is written already, to stand in a body that is not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fragment:
    """A value as it stands in JSON; ASCII."""

    text: str
