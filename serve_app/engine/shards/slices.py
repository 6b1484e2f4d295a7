"""A checkpoint as one shard reads it: of each weight that is divided, its own part and no more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from serve_app.engine.shards.division import Cut, Division


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


def open_parts(folder: Path, division: Division) -> dict[str, Part]:
    """The tensors of a folder's safetensors files, by their names."""
    parts: dict[str, Part] = {}
    for file in sorted(folder.glob("*.safetensors")):
        handle = safe_open(file, framework="pt")  # slices keep it open
        for name in handle.keys():  # noqa: SIM118  (no mapping)
            module, _, kind = name.rpartition(".")
            parts[name] = Part(
                stored=handle.get_slice(name),
                cut=division.cut(module),
                is_bias=kind == "bias",
                is_first=division.is_first,
            )
    return parts
