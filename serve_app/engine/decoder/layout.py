"""Replaces a model's plain linears by ones laid out for this machine, and frees the plain weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from serve_app.engine.decoder.allocator import FilePages
from serve_app.engine.decoder.linears import PackedEmbedding, PackedLinear, can_join, join, pays, pays_in
from serve_app.engine.decoder.stored import StoredLinear, Widening, widen_rest

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules of one parent that read the same input, in models that the loop computes."""
NO_PAGES = FilePages([])


@torch.no_grad()
def lay_out(module: PreTrainedModel, *, joins: bool) -> None:
    """Lay out what is computed faster so. No weight stays in memory as the checkpoint's file has it.

    joins: what reads one input, for a model that the loop may compute
    """
    widening, pages = Widening.of(module), FilePages.of_this_process(".safetensors")
    pack_head(module, widening, pages)
    if joins:
        join_linears(module.get_decoder(), widening, pages)
    pack_linears(module, widening, pages)
    widen_rest(module)


def join_linears(decoder: nn.Module, widening: Widening | None = None, pages: FilePages = NO_PAGES) -> None:
    """Compute together what reads one input."""
    for parent in list(decoder.modules()):
        for names in JOINED:
            linears = [getattr(parent, name, None) for name in names]
            if can_join(linears):
                for name, part in zip(names, join(linears, widening), strict=True):
                    setattr(parent, name, part)
                _give_back(linears, pages)
                del linears


def pack_linears(module: PreTrainedModel, widening: Widening | None = None, pages: FilePages = NO_PAGES) -> None:
    """Pack every other linear of the decoder, and the head; a tied embedding is read from the head then.

    widening: for weights that are stored in fewer bits; without it those are left as they are
    pages:    of the files that weights may be read from
    """
    pack_head(module, widening, pages)
    for parent in list(module.get_decoder().modules()):
        for name, child in list(parent.named_children()):
            if (packed := _packed(child, widening)) is not None:
                setattr(parent, name, packed)
                _give_back([child], pages)


def pack_head(module: PreTrainedModel, widening: Widening | None = None, pages: FilePages = NO_PAGES) -> None:
    """Not where an embedding is tied to it that could not be read from it: the weights would be there twice.

    Done before the rest it takes the least memory: nothing else is as large while it is there in two forms.
    """
    head: Any = module.get_output_embeddings()
    packed = _packed(head, widening)
    if packed is None:
        return
    embedding: Any = module.get_input_embeddings()
    if embedding.weight is head.weight:
        found = PackedEmbedding.find(packed, embedding)
        if found is None:
            return
        module.set_input_embeddings(found)
    module.set_output_embeddings(packed)
    _give_back([head], pages)


def _packed(linear: Any, widening: Widening | None) -> PackedLinear | None:
    """None where it is no linear, or one that is as fast as it is."""
    if type(linear) is nn.Linear and pays(linear.weight):
        return PackedLinear(linear.weight, linear.bias)
    if widening is not None and type(linear) is StoredLinear and pays_in(linear.weight, widening.dtype):
        return PackedLinear(widening.together([linear]), linear.bias)
    return None


def _give_back(linears: Sequence[Any], pages: FilePages) -> None:
    """What the file has of linears that are laid out now: nothing reads it again."""
    for linear in linears:
        if isinstance(linear, nn.Linear):
            pages.give_back(linear.weight.data_ptr(), linear.weight.nbytes)
