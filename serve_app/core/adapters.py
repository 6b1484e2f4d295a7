"""What is known of an adapter on disk, judged once where it is found and handed on to whoever computes with it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from serve_app.core.cards import AdapterCard

T = TypeVar("T")

MAX_PATTERN_KEYS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What an adapter's tensors mean.

    rank, alpha: where no pattern names the module; PEFT's `r` and `lora_alpha`
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """Give the rank for a module, by its name within the base model."""
        return _lookup(self.rank_pattern, module, default=self.rank)

    def scale_of(self, module: str) -> float:
        """Give the factor of B·A: alpha / r, or alpha / √r with rsLoRA (arXiv 2312.03732)."""
        rank = self.rank_of(module)
        alpha = _lookup(self.alpha_pattern, module, default=self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an adapter does to one linear module: y += scaling * up @ (down @ x), then DoRA's magnitude.

    down, up, magnitude: names of the tensors in the file; [rank, inputs], [outputs, rank], [outputs]; magnitude only
    with DoRA
    """

    rank: int
    inputs: int
    outputs: int
    scaling: float
    down: str
    up: str
    magnitude: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """One adapter found on disk.

    version: digest of configuration and weights; "" where they could not be read
    weights: the file of its tensors
    changes: by the name of the module; whether the model has such modules is for the engine to say
    reason:  why it cannot be used; None for a usable one
    created: Unix seconds of its weights
    """

    name: str
    path: Path
    version: str = ""
    weights: Path | None = None
    changes: Mapping[str, Change] = field(default_factory=dict)
    reason: str | None = None
    created: int = 0

    @property
    def is_usable(self) -> bool:
        return self.reason is None

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max((change.rank for change in self.changes.values()), default=0)

    def card(self) -> AdapterCard:
        """Give what routers and clients are told of it."""
        return AdapterCard(
            name=self.name,
            version=self.version,
            rank=self.rank,
            reason=self.reason,
            root=str(self.path),
            created=self.created,
        )


@lru_cache(maxsize=2 * MAX_PATTERN_KEYS)
def compile_pattern(key: str) -> re.Pattern[str]:
    """The expression by which a key of PEFT's patterns names modules: the end of their name. Raises re.error."""
    return re.compile(rf"(.*\.)?({key})$")


def _lookup(pattern: Mapping[str, T], module: str, *, default: T) -> T:
    """Find the first key that matches the end of the module's name, as PEFT's `get_pattern_key` does."""
    for key, value in pattern.items():
        if compile_pattern(key).match(module):
            return value
    return default
