"""Has the linears of a model laid out for this machine, in the places of the plain ones, whose memory is given back."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from serve_app.engine.decoder.embedding import PackedEmbedding
from serve_app.engine.decoder.linears import PackedLinear, can_join, join, pays

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules of one parent that read the same input, in models that the loop computes."""


def join_linears(decoder: nn.Module) -> None:
    """Compute together what reads one input."""
    for parent in list(decoder.modules()):
        for names in JOINED:
            linears = [getattr(parent, name, None) for name in names]
            if can_join(linears):
                for name, part in zip(names, join(linears), strict=True):
                    setattr(parent, name, part)
                del linears


def pack_linears(module: PreTrainedModel) -> None:
    """Pack every other linear of the decoder, and the head; a tied embedding is read from the head then."""
    decoder: nn.Module = module.get_decoder()
    for parent in list(decoder.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and pays(child.weight):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    head: Any = module.get_output_embeddings()
    if type(head) is nn.Linear and pays(head.weight):
        _pack_head(module, head)


def _pack_head(module: PreTrainedModel, head: nn.Linear) -> None:
    """Not where an embedding is tied to it that could not be read from it: the weights would be there twice."""
    embedding: Any = module.get_input_embeddings()
    packed = PackedLinear(head.weight, head.bias)
    if embedding.weight is head.weight:
        found = PackedEmbedding.find(packed, embedding)
        if found is None:
            return
        module.set_input_embeddings(found)
    module.set_output_embeddings(packed)
