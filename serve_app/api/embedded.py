"""That a prompt is to be embedded, and how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """dimensions: None is all that the model has;  is_base64: how vectors are written"""

    dimensions: int | None = None
    is_base64: bool = False
