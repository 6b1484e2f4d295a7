"""Reads a quantised checkpoint under the names of plain weights, and decodes each weight when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from serve_app.core.weight_files import weight_files
from serve_app.engine.decoder.errors import ModelNotSupported
from serve_app.engine.decoder.transformers_private import mark_as_loaded
from serve_app.engine.quantized.formats import BNB_STATES, IGNORED, Format
from serve_app.engine.quantized.linear import (
    GROUP,
    Bits,
    Int4Groups,
    Int8Rows,
    QuantisedLinear,
    Rounded,
    check_fits,
    round_to,
)

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


ROUTERS = frozenset({"gate", "shared_expert_gate", "router"})
"""Parts of the names of what chooses experts, which a little noise would choose others by."""

Kept = Callable[[str], Rounded | None]
"""What a checkpoint stores of a weight in few bits already, by the weight's name."""


class Awaiting(nn.Module):
    """In the place of a linear whose weight has not been read. Takes it in full, and keeps it rounded.

    What shows of the weight stays on the device meta, before and after: shape and type, no numbers.
    """

    def __init__(self, linear: nn.Module, name: str, bits: Bits, kept: Kept) -> None:
        """linear: one of torch's, or transformers' Conv1D"""
        super().__init__()
        weight: Any = linear.weight
        self.bits = bits
        self.linear: QuantisedLinear | None = None
        self._is_transposed = isinstance(linear, Conv1D)
        self._kept = kept
        self._name = name
        self._parameters["weight"] = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
        bias: Any = linear.bias
        self.bias: Tensor | None = bias

    @property
    def num_bytes(self) -> int:
        """What its weight will take, without the bias."""
        outputs, inputs = self._shape
        each = 1 if self.bits == "int8" else 0.5 + 4 / GROUP  # a scale and an offset of two bytes in every group
        return int(outputs * inputs * each)

    def check(self) -> None:
        """Raise ModelNotSupported where there is no kernel for its shape."""
        if self.bits == "int4":
            check_fits(self._name, *self._shape)

    def settled(self) -> QuantisedLinear:
        """What is to stand here once everything has been read."""
        assert self.linear is not None, f"no weight was read for {self._name}"
        self.linear.bias = self.bias
        return self.linear

    @property
    def _shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        first, second = self.get_parameter("weight").shape
        return (second, first) if self._is_transposed else (first, second)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif value.device.type != "meta":
            self._take(value.detach())

    def _take(self, weight: Tensor) -> None:
        weight = weight.T if self._is_transposed else weight
        rounded = self._kept(f"{self._name}.weight")
        if rounded is None or rounded.numbers.shape != weight.shape:
            rounded = round_to(self.bits, weight)
        mark_as_loaded(self.get_parameter("weight"))
        self.__dict__["linear"] = QuantisedLinear(
            rounded, None, dtype=weight.dtype
        )  # hidden from who looks for weights


def receiving(kind: type[PreTrainedModel], bits: Bits, kept: Kept) -> type[PreTrainedModel]:
    """The class, whose instances await their weights from their first moment on. `settle_weights` ends that.

    Raises ModelNotSupported, when one is made, where a shape has no kernel.
    """

    def __init__(self: Any, config: Any, *positional: Any, **named: Any) -> None:
        kind.__init__(self, config, *positional, **named)
        for linear in await_weights(self, bits, kept):
            linear.check()

    members = {"__init__": __init__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), members)  # transformers finds renamings by the class's name


def await_weights(model: PreTrainedModel, bits: Bits, kept: Kept = lambda name: None) -> list[Awaiting]:
    """Replace the linears of the decoder and the head, but for what chooses experts.

    The head has eight bits in any case: its rows are the tokens, and what it loses is lost to every choice.
    """
    head = model.get_output_embeddings()
    inner = set(model.get_decoder().modules())
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D)
        and (module is head or (module in inner and not ROUTERS & set(name.split("."))))
    }
    made = {name: Awaiting(module, name, "int8" if module is head else bits, kept) for name, module in found.items()}
    for name, each in made.items():
        replace(model, name, each)
    return list(made.values())


def settle_weights(model: PreTrainedModel) -> None:
    """Put what was made of each weight in its place."""
    for name, module in [*model.named_modules()]:
        if isinstance(module, Awaiting):
            replace(model, name, module.settled())


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
