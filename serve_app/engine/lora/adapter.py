"""An adapter bound to a model: which of its modules it changes and how, or why it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from serve_app.core.adapters import AdapterRecord, Change
from serve_app.engine.decoder.linears import LinearPart, PackedLinear
from serve_app.engine.lora.errors import AdapterRefused
from serve_app.engine.lora.weights_file import WeightsFile
from serve_app.engine.quantized.linear import QuantisedLinear
from serve_app.engine.shards.division import Division

LINEARS = (nn.Linear, Conv1D, PackedLinear, LinearPart, QuantisedLinear)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter version: facts in memory, weights in their file until it moves into a slot.

    changes: by the module's name
    """

    version: str
    file: WeightsFile
    changes: Mapping[str, Change]

    @property
    def rank(self) -> int:
        return max(change.rank for change in self.changes.values())


def bind_adapter(record: AdapterRecord, model: nn.Module, *, division: Division | None = None) -> Adapter:
    """Bind each change to a linear module of the model. What the files hold was judged where they were found.

    division: of a model that is a part of one

    Raises AdapterRefused: with the record's own reason, or where it does not fit the model. The weights themselves
    are read, and judged, where they move in.
    """
    if record.reason is not None or record.weights is None:
        raise AdapterRefused(record.reason or "it has no weights")
    linears = linear_modules(model)
    for name, change in record.changes.items():
        if name not in linears:
            raise AdapterRefused(f"the model has no linear module {name} that an adapter may change")
        if division is not None and change.magnitude is not None:
            raise AdapterRefused(f"module {name}: DoRA is not computed where a model is divided (tensor_parallel)")
        wanted = tuple(frame_of(linears[name]).shape)
        if division is not None and (cut := division.cut(name)) is not None:
            wanted = cut.whole_of(wanted)
        if (change.outputs, change.inputs) != wanted:
            raise AdapterRefused(
                f"module {name}: lora_A {(change.rank, change.inputs)} and lora_B {(change.outputs, change.rank)} do"
                f" not fit its weight {wanted}"
            )
    try:
        file = WeightsFile(record.weights)
    except OSError as error:
        raise AdapterRefused(f"{record.weights.name}: {error}") from error
    return Adapter(version=record.version, file=file, changes=record.changes)


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that an adapter may change, by name: linear layers before the output head."""
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LINEARS) and module is not head
    }


def frame_of(module: nn.Module) -> Tensor:
    """What has the size, type and device of the module's weight [out, in], and need not have its numbers."""
    frame: Tensor | None = getattr(module, "frame", None)
    return weight_of(module) if frame is None else frame


def weight_of(module: nn.Module) -> Tensor:
    """The module's weight as [out, in]; transformers' Conv1D keeps it the other way round."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.T if isinstance(module, Conv1D) else weight
