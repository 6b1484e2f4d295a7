"""Modules that take weights while a model is read: in 16 bits in their file until they are laid out, or rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from serve_app.engine.decoder.memory import FilePages
from serve_app.engine.decoder.quantized_linear import (
    GROUP,
    Bits,
    QuantisedLinear,
    Rounded,
    check_fits,
    round_to,
)
from serve_app.engine.decoder.text_part import FAMILIES, extended, text_config
from serve_app.engine.decoder.transformers_private import mark_as_loaded

NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}
MAX_WIDENED = 1 << 20
"""Entries of a weight that are widened at a time to be multiplied: what a processor's caches hold."""


class StoredLinear(nn.Linear):
    """A linear whose weight is kept in fewer bits than it computes in. Each number is what it is in the wider type.

    dtype:       in which it computes
    gives_zeros: and reads nothing
    """

    dtype: torch.dtype
    gives_zeros = False

    def forward(self, x: Tensor) -> Tensor:
        if self.gives_zeros:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        y = x.new_empty(*x.shape[:-1], self.out_features)
        rows = max(1, MAX_WIDENED // self.in_features)
        for begin in range(0, self.out_features, rows):
            part = slice(begin, begin + rows)
            bias = None if self.bias is None else self.bias[part]
            y[..., part] = F.linear(x, self.weight[part].to(x.dtype), bias)
        return y


@contextmanager
def giving_zeros(module: nn.Module) -> Iterator[None]:
    """Have linears with stored weights give zeros and read none, for callers that need shapes alone."""
    linears = [each for each in module.modules() if isinstance(each, StoredLinear)]
    for linear in linears:
        linear.gives_zeros = True
    try:
        yield
    finally:
        for linear in linears:
            linear.gives_zeros = False


class StoredEmbedding(nn.Embedding):
    """An embedding whose weight is kept in fewer bits than it gives."""

    dtype: torch.dtype

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).to(self.dtype)


class Widening:
    """Gives weights in wider numbers, each over the one before, whose memory it takes again.

    Pages of the file that were read for it are given back, as nothing reads them a second time.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._room = torch.empty(0, dtype=dtype)
        self._pages = FilePages.of_this_process(".safetensors")

    @classmethod
    def of(cls, module: nn.Module) -> Widening | None:
        """Return one for the linears of a module that were left stored; None if there are none."""
        found = next((each.dtype for each in module.modules() if isinstance(each, StoredLinear)), None)
        return None if found is None else cls(found)

    def together(self, linears: Iterable[Any]) -> Tensor:
        """Return weights of linears with the same inputs, one behind the other; valid until the next call."""
        weights = [linear.weight.detach() for linear in linears]
        outputs, inputs = sum(len(each) for each in weights), weights[0].shape[1]
        if self._room.numel() < outputs * inputs:
            self._room = torch.empty(0, dtype=self.dtype)  # the old one goes before the new one comes
            self._room = torch.empty(outputs * inputs, dtype=self.dtype)
        whole = self._room[: outputs * inputs].view(outputs, inputs)
        torch.cat(weights, out=whole) if weights[0].dtype == self.dtype else self._widen(weights, whole)
        return whole

    def _widen(self, weights: list[Tensor], whole: Tensor) -> None:
        begin = 0
        for weight in weights:
            whole[begin : begin + len(weight)].copy_(weight)
            begin += len(weight)
            self._pages.give_back(weight.data_ptr(), weight.nbytes)


def stored_dtype(slices: Mapping[str, Any]) -> torch.dtype | None:
    """Return the 16-bit dtype of all of a checkpoint's matrices; None if they have no such dtype in common."""
    found = {each.get_dtype() for each in slices.values() if len(each.get_shape()) > 1}
    return NARROW.get(found.pop()) if len(found) == 1 else None


def storing(kind: type[PreTrainedModel], stored: torch.dtype) -> type[PreTrainedModel]:
    """Return a class whose instances leave weights of linears and a plain embedding in their file's dtype.

    For families of the loop alone, none of which asks a linear for its type. `widen_rest` ends it.
    """

    def leave(model: PreTrainedModel, config: Any) -> None:
        if str(text_config(config).model_type) in FAMILIES:
            _leave_stored(model, stored)

    return extended(kind, leave)


def _leave_stored(model: PreTrainedModel, stored: torch.dtype) -> None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    inner = set(model.get_decoder().modules())
    for name, module in [*model.named_modules()]:
        if type(module) is nn.Linear and (module is head or module in inner):
            linear = StoredLinear(module.in_features, module.out_features, bias=False, device="meta", dtype=stored)
            linear.bias, linear.dtype = module.bias, module.weight.dtype
            model.set_submodule(name, linear)
        elif type(module) is nn.Embedding and module is embedding:
            model.set_submodule(name, _stored_embedding(module, stored))


def _stored_embedding(embedding: nn.Embedding, stored: torch.dtype) -> StoredEmbedding:
    made = StoredEmbedding(
        embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx, device="meta", dtype=stored
    )
    made.dtype = embedding.weight.dtype
    return made


def widen_rest(model: PreTrainedModel) -> None:
    """Make plain modules of those that were left stored; what is tied stays so."""
    widened: dict[int, nn.Parameter] = {}
    for name, module in [*model.named_modules()]:
        if isinstance(module, StoredLinear | StoredEmbedding):
            weight = module.weight
            wide = widened.setdefault(id(weight), nn.Parameter(weight.detach().to(module.dtype), requires_grad=False))
            model.set_submodule(name, _plain(module, wide))


def _plain(module: StoredLinear | StoredEmbedding, weight: nn.Parameter) -> nn.Module:
    if isinstance(module, StoredLinear):
        return plain_linear(weight, module.bias).train(module.training)
    plain = nn.Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx, device="meta")
    plain.weight = weight
    return plain.train(module.training)


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear of torch's own kernels. weight: [outputs, inputs];  bias: [outputs]; parameters stay the same"""
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=False, device="meta")
    for name, each in (("weight", weight), ("bias", bias)):
        if each is not None and not isinstance(each, nn.Parameter):
            each = nn.Parameter(each.detach(), requires_grad=False)
        setattr(made, name, each)
    return made


ROUTERS = frozenset({"gate", "shared_expert_gate", "router"})
"""Parts of the names of what chooses experts, which a little noise would choose others by."""

Kept = Callable[[str], Rounded | None]
"""What a checkpoint stores of a weight in few bits already, by the weight's name."""


class Awaiting(nn.Module):
    """Stands in for a linear whose weight has not been read. Takes the weight in full, and keeps it rounded.

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
        """Return the bytes that its weight will take, without the bias."""
        outputs, inputs = self._shape
        each = 1 if self.bits == "int8" else 0.5 + 4 / GROUP  # a scale and an offset of two bytes in every group
        return int(outputs * inputs * each)

    def check(self) -> None:
        """Raise ModelNotSupported where there is no kernel for its shape."""
        if self.bits == "int4":
            check_fits(self._name, *self._shape)

    def settled(self) -> QuantisedLinear:
        """Return the linear that is to stand here once everything has been read."""
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
    """Return a class whose instances await their weights. `settle_weights` ends that.

    Raises ModelNotSupported, when one is made, where a shape has no kernel.
    """

    def await_all(model: PreTrainedModel, _: object) -> None:
        for linear in await_weights(model, bits, kept):
            linear.check()

    return extended(kind, await_all)


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
        model.set_submodule(name, each)
    return list(made.values())


def settle_weights(model: PreTrainedModel) -> None:
    """Put what was made of each weight in its place."""
    for name, module in [*model.named_modules()]:
        if isinstance(module, Awaiting):
            model.set_submodule(name, module.settled())
