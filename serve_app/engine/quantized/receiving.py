"""Has a model's linears rounded as their weights are read, one by one, so that never all of them are there in full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from serve_app.engine.quantized.int4_kernel import check_fits
from serve_app.engine.quantized.linear import QuantisedLinear, round_to
from serve_app.engine.quantized.rounding import GROUP, Bits, Rounded

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
        self.get_parameter("weight")._is_hf_initialized = True  # type: ignore[attr-defined]  # else it is filled anew
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
