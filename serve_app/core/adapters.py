"""What is known of an adapter on disk before any model is asked whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.core.cards import AdapterCard


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """One adapter found on disk.

    version: digest of configuration and weights; "" where they could not be read
    weights: the file of its tensors
    fields:  its adapter_config.json; what they mean for a model is for the engine to say
    tensors: the shape of each tensor, by its name in the file
    reason:  why it cannot be used; None for a usable one
    created: Unix seconds of its weights
    """

    name: str
    path: Path
    version: str = ""
    weights: Path | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reason: str | None = None
    created: int = 0

    @property
    def is_usable(self) -> bool:
        return self.reason is None

    def card(self) -> AdapterCard:
        """Give what routers and clients are told of it."""
        rank = self.fields.get("r", 0)
        return AdapterCard(
            name=self.name,
            version=self.version,
            rank=rank if type(rank) is int else 0,
            reason=self.reason,
            root=str(self.path),
            created=self.created,
        )
