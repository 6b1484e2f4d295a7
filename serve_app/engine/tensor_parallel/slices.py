"""A checkpoint as one shard reads it: of each weight that is divided, its own part and no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from serve_app.engine.tensor_parallel.division import Cut, Division


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor's part, read by `part[...]`, as a slice of a safetensors file is."""

    stored: Any
    cut: Cut | None
    is_bias: bool
    is_first: bool

    def __getitem__(self, index: Any) -> Tensor:
        if self.cut is None:
            whole: Tensor = self.stored[index]
            return whole
        read = self.cut.bias(self.stored, is_first=self.is_first) if self.is_bias else self.cut.weight(self.stored)
        return read[index]


def parts_of(slices: Mapping[str, Any], division: Division) -> dict[str, Part]:
    """The tensors of a checkpoint, by their names, each as the shard has it."""
    parts: dict[str, Part] = {}
    for name, stored in slices.items():
        module, _, kind = name.rpartition(".")
        cut, is_bias = division.cut(module), kind == "bias"
        parts[name] = Part(stored=stored, cut=cut, is_bias=is_bias, is_first=division.is_first)
    return parts
