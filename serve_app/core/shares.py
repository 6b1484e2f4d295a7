"""Whose a request is, and how much of a replica that is to have where several want it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Priority = Literal["interactive", "standard", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What the engine knows of who asked; it knows no tenants, keys or limits.

    flow:     requests of the same flow share what they get
    weight:   > 0; a flow with three times the weight of another gets three times as much while both want more
    priority: of this request; where not all can begin, interactive ones go before standard ones before batch
    """

    flow: str = "local"
    weight: float = 1.0
    priority: Priority = "standard"
