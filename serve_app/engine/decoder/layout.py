"""Lays linears out for this machine, at load; and in the background, in 16 bits, where that is exact."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from serve_app.core.machine import MOST, give_way
from serve_app.engine.decoder.linears import (
    HalfWeight,
    LinearPart,
    OneDnnWeight,
    PackedEmbedding,
    PackedLinear,
    can_join,
    factor_for,
    join,
    pays,
    unwrapped,
)
from serve_app.engine.decoder.memory import FilePages, give_back_freed_memory, lay_in_huge_pages_last
from serve_app.engine.decoder.stored import StoredLinear, Widening, widen_rest

logger = logging.getLogger(__name__)

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules of one parent that read the same input, in models that the loop computes."""


@torch.no_grad()
def lay_out(module: PreTrainedModel, *, joins: bool) -> None:
    """Lay out what is computed faster so. No weight stays in memory as the checkpoint's file has it.

    1. The head: nothing else is as large while it is there in two forms. A tied embedding is read from it then.
    2. What reads one input is joined.
    3. Every other linear of the decoder.
    4. What is left in the file's numbers becomes plain.

    joins: whether step 2 is taken, for a model that the loop may compute
    """
    widening, pages = Widening.of(module), FilePages.of_this_process(".safetensors")
    _pack_head(module, widening, pages)
    if joins:
        _join_linears(module.get_decoder(), widening, pages)
    for parent in list(module.get_decoder().modules()):
        for name, child in list(parent.named_children()):
            if (packed := _packed(child, widening)) is not None:
                setattr(parent, name, packed)
                _give_back([child], pages)
    widen_rest(module)


def _join_linears(decoder: nn.Module, widening: Widening | None, pages: FilePages) -> None:
    for parent in list(decoder.modules()):
        for names in JOINED:
            linears = [getattr(parent, name, None) for name in names]
            if can_join(linears):
                for name, part in zip(names, join(linears, widening), strict=True):
                    setattr(parent, name, part)
                _give_back(linears, pages)
                del linears


def _pack_head(module: PreTrainedModel, widening: Widening | None, pages: FilePages) -> None:
    """Lay the head out, unless an embedding is tied to it that could not be read from it: it would be there twice."""
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
    """Return the linear laid out; None if it is no linear, or one that is as fast as it is."""
    if type(linear) is nn.Linear and pays(linear.weight):
        return PackedLinear(linear.weight, linear.bias)
    if widening is not None and type(linear) is StoredLinear and pays(linear.weight, widening.dtype):
        return PackedLinear(widening.together([linear]), linear.bias)
    return None


def _give_back(linears: Sequence[Any], pages: FilePages) -> None:
    """Drop what the file has of linears that are laid out now: nothing reads it again."""
    for linear in linears:
        if isinstance(linear, nn.Linear):
            pages.give_back(linear.weight.data_ptr(), linear.weight.nbytes)


TRIED_ROWS = 3
ALLOWED = 2.0**-14
"""By how much the new form's outputs may differ from the old one's, of their largest: sums have another order."""


class BackgroundDowncast:
    """Exchanges the forms of a model's linears one by one, in the calling thread; steps go on meanwhile.

    A step computes each linear by the form that it finds, so two tokens of a text may be computed by different ones,
    as they may in different company: the numbers are the same, their sums have another order.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._is_over = threading.Event()

    def start(self) -> None:
        """Run beside everything else, in a thread of the lowest priority. Then move memory that stays to huge pages."""
        threading.Thread(target=self._run_last, name="downcast", daemon=True).start()

    def _run_last(self) -> None:
        give_way(MOST)
        try:
            self.run()
        except Exception:
            logger.exception("weights stay as they are")
        if self._module.device.type == "cpu":
            lay_in_huge_pages_last(is_over=self._is_over.is_set)

    def run(self) -> int:
        """Returns how many linears were exchanged. Takes 10 to 25 ns of a core for each of their weights."""
        began, count = time.monotonic(), 0
        for linear in _linears(self._module):
            if self._is_over.is_set():
                break
            if (new := _half_of(linear)) is not None:
                linear.kept = new
                count += 1
        if not self._is_over.is_set():
            count += self._downcast_head()
        give_back_freed_memory()
        if count:
            seconds = time.monotonic() - began
            logger.info("%s: %d linears keep 16 bits after %.1f s", type(self._module).__name__, count, seconds)
        return count

    def _downcast_head(self) -> bool:
        """Downcast the head last, as it takes most memory, with the embedding that is read from it."""
        head, embedding = map(unwrapped, (self._module.get_output_embeddings(), self._module.get_input_embeddings()))
        if not isinstance(head, PackedLinear) or (new := _half_of(head)) is None:
            return False
        if isinstance(embedding, PackedEmbedding) and not embedding.downcast():
            return False
        head.kept = new
        return True

    def stop(self) -> None:
        """Stop behind the current linear."""
        self._is_over.set()


def _linears(module: PreTrainedModel) -> Iterator[PackedLinear]:
    """Return the decoder's packed linears; joined ones as a whole, and without the head."""
    seen: set[int] = set()
    decoder: nn.Module = module.get_decoder()
    for each in list(decoder.modules()):
        linear = each.joint.whole if isinstance(each, LinearPart) else each
        if isinstance(linear, PackedLinear) and id(linear) not in seen:
            seen.add(id(linear))
            yield linear


@torch.inference_mode()
def _half_of(linear: PackedLinear) -> HalfWeight | None:
    """Return a linear's weight in 16 bits; None if it has these already, or would lose something."""
    old = linear.kept
    if not isinstance(old, OneDnnWeight) or old.dtype != torch.float32:  # asked before it is copied to be looked at
        return None
    weight = old.dense
    factor = factor_for(weight)
    if factor is None:
        return None
    new = HalfWeight(weight, linear.bias, factor)
    return new if _agree(old, new, linear.in_features) else None


def _agree(old: OneDnnWeight, new: HalfWeight, num_inputs: int) -> bool:
    x: Tensor = torch.randn(TRIED_ROWS, num_inputs, generator=torch.Generator().manual_seed(0))
    expected = old(x)
    return float((new(x) - expected).abs().max()) <= ALLOWED * float(expected.abs().max())
