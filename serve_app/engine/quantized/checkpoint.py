"""A quantised checkpoint as a model reads it: by the names of plain weights, each decoded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from serve_app.core.weight_files import weight_files
from serve_app.engine.decoder.errors import ModelNotSupported
from serve_app.engine.quantized.formats import BNB_STATES, IGNORED, Format
from serve_app.engine.quantized.rounding import Bits, Int4Groups, Int8Rows, Rounded

STORED_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8", "I16", "I32"})
"""In which no weight is plain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight, read and decoded by `weight[...]`, as a slice of a safetensors file is.

    slices: of the files, by the endings of their names; a plain weight is one under ""
    """

    name: str
    slices: Mapping[str, Any]
    format: Format | None

    def __getitem__(self, index: Any) -> Tensor:
        if self.format is None:
            plain: Tensor = self.slices[""][index]
            return plain
        try:
            parts = {ending: each[...] for ending, each in self.slices.items()}
            with parts[self.format.main].device:  # an outline's parts have no numbers, and no tables either
                return self.format.decode(parts)[index]
        except (ValueError, KeyError, IndexError, RuntimeError) as error:
            raise ModelNotSupported(f"tensor {self.name} cannot be dequantised: {error}") from error

    def keep(self) -> Rounded | None:
        """The weight in few bits as it is stored, where that is in a form that a kernel computes with."""
        if self.format is None or self.format.keep is None:
            return None
        return self.format.keep({ending: each[...] for ending, each in self.slices.items()})


def kept_in(weights: Mapping[str, Weight], bits: Bits) -> Callable[[str], Rounded | None]:
    """What a checkpoint stores in so many bits already: given as it is stored, not rounded once more."""
    wanted = Int8Rows if bits == "int8" else Int4Groups

    def kept(name: str) -> Rounded | None:
        rounded = weights[name].keep() if name in weights else None
        return rounded if isinstance(rounded, wanted) else None

    return kept


def open_slices(folder: Path) -> dict[str, Any]:
    """The tensors of a folder's weight files by their names, none of them read yet."""
    slices: dict[str, Any] = {}
    for file in weight_files(folder):
        handle = safe_open(file, framework="pt")  # slices keep it open
        slices |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (no mapping)
    return slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A stored tensor's shape and type in the place of its numbers, which are not read."""

    stored: Any

    def get_dtype(self) -> str:
        return str(self.stored.get_dtype())

    def get_shape(self) -> list[int]:
        return list(self.stored.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        shape = self.get_shape()
        empty: Tensor = self.stored[:0] if shape else self.stored[...]
        return torch.empty(shape, dtype=empty.dtype, device="meta")[index]


def outlines(slices: Mapping[str, Any]) -> dict[str, Any]:
    """The outlines of tensors, but for those few numbers that say how another is stored."""
    return {
        name: each if name.endswith((".weight_shape", *BNB_STATES)) else Outline(stored=each)
        for name, each in slices.items()
    }


def as_plain(slices: Mapping[str, Any], formats: Iterable[Format]) -> dict[str, Weight]:
    """The weights of a quantised checkpoint by the names a plain one would have.

    Raises ModelNotSupported where a tensor is stored in few bits, but not as the formats say.
    """
    weights: dict[str, Weight] = {}
    taken: set[str] = set()
    for form in formats:
        for name in sorted(set(slices) - taken):
            stem = name.removesuffix(form.main)
            if stem == name or not any(stem + sign in slices for sign in form.signs):
                continue
            own = {end: slices[stem + end] for end in (form.main, *form.parts) if stem + end in slices}
            weights[stem + form.becomes] = Weight(name=name, slices=own, format=form)
            taken |= {stem + end for end in own}
    for name in sorted(set(slices) - taken):
        if not name.endswith(IGNORED):
            _check_plain(name, slices[name])
            weights[name] = Weight(name=name, slices={"": slices[name]}, format=None)
    return weights


def _check_plain(name: str, stored: Any) -> None:
    if stored.get_dtype() in STORED_DTYPES and len(stored.get_shape()) > 1:
        raise ModelNotSupported(
            f"tensor {name} is {stored.get_dtype()}, and no scale is beside it under a name that is known"
        )
