"""Weights that stay in a checkpoint's file, in 16 bits, until they are laid out in the computed precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from serve_app.engine.decoder.allocator import FilePages
from serve_app.engine.decoder.text_part import FAMILIES, text_config
from serve_app.engine.quantized.checkpoint import replace

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
    """Within it, linears whose weights are stored give zeros and read none: for who asks for shapes alone."""
    linears = [each for each in module.modules() if isinstance(each, StoredLinear)]
    for linear in linears:
        linear.gives_zeros = True
    try:
        yield
    finally:
        for linear in linears:
            linear.gives_zeros = False


class StoredEmbedding(nn.Embedding):
    """The same of an embedding."""

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
        """For the linears of a module that were left stored; None where there are none."""
        found = next((each.dtype for each in module.modules() if isinstance(each, StoredLinear)), None)
        return None if found is None else cls(found)

    def together(self, linears: Iterable[Any]) -> Tensor:
        """Weights of linears with the same inputs, one behind the other; valid until the next ones are asked for."""
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
    """In which narrow type a checkpoint has all of its matrices; None where it does not."""
    found = {each.get_dtype() for each in slices.values() if len(each.get_shape()) > 1}
    return NARROW.get(found.pop()) if len(found) == 1 else None


def storing(kind: type[PreTrainedModel], stored: torch.dtype) -> type[PreTrainedModel]:
    """The class, whose instances leave the weights of linears and of a plain embedding in the type of their file.

    For families of the loop alone, none of which asks a linear for its type. `widen_rest` ends it.
    """

    def __init__(self: Any, config: Any, *positional: Any, **named: Any) -> None:
        kind.__init__(self, config, *positional, **named)
        if str(text_config(config).model_type) in FAMILIES:
            _leave_stored(self, stored)

    members = {"__init__": __init__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), members)  # transformers finds renamings by the class's name


def _leave_stored(model: PreTrainedModel, stored: torch.dtype) -> None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    inner = set(model.get_decoder().modules())
    for name, module in [*model.named_modules()]:
        if type(module) is nn.Linear and (module is head or module in inner):
            linear = StoredLinear(module.in_features, module.out_features, bias=False, device="meta", dtype=stored)
            linear.bias, linear.dtype = module.bias, module.weight.dtype
            replace(model, name, linear)
        elif type(module) is nn.Embedding and module is embedding:
            replace(model, name, _stored_embedding(module, stored))


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
            replace(model, name, _plain(module, wide))


def _plain(module: StoredLinear | StoredEmbedding, weight: nn.Parameter) -> nn.Module:
    plain: nn.Linear | nn.Embedding
    if isinstance(module, StoredLinear):
        plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        plain.bias = module.bias
    else:
        plain = nn.Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx, device="meta")
    plain.weight = weight
    return plain.train(module.training)
