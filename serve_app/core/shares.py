"""Whose share of the engine a request is computed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Priority = Literal["interactive", "standard", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """flow: whose requests take turns with each other's: the name of a tenant
    weight: of its share beside those of the other flows, > 0
    priority: the class that it waits in
    """

    flow: str = "local"
    weight: float = 1.0
    priority: Priority = "standard"
