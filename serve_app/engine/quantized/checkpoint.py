"""A quantised checkpoint as a model reads it: by the names of plain weights, each decoded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from serve_app.engine.errors import ModelNotSupported
from serve_app.engine.quantized.formats import IGNORED, Format
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
            return self.format.decode({ending: each[...] for ending, each in self.slices.items()})[index]
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


def open_checkpoint(folder: Path, formats: Iterable[Format]) -> dict[str, Weight]:
    """The weights of a folder's safetensors files by the names a plain checkpoint would have.

    Raises ModelNotSupported where a tensor is stored in few bits, but not as the formats say.
    """
    slices: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        handle = safe_open(file, framework="pt")  # slices keep it open
        slices |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (no mapping)
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
