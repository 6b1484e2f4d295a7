"""Stores weights in 16 bits while the model serves, if that is exact. It takes too long to do before serving."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from serve_app.core.machine import MOST, give_way
from serve_app.engine.decoder.allocator import give_back_freed_memory, lay_in_huge_pages
from serve_app.engine.decoder.linears import (
    HalfWeight,
    LinearPart,
    OneDnnWeight,
    PackedEmbedding,
    PackedLinear,
    factor_for,
)

logger = logging.getLogger(__name__)

TRIED_ROWS = 3
ALLOWED = 2.0**-14
"""By how much the new form's outputs may differ from the old one's, of their largest: sums have another order."""


class Narrowing:
    """Exchanges the forms of a model's linears one by one, in the calling thread; steps go on meanwhile.

    A step computes each linear by the form that it finds, so two tokens of a text may be computed by different ones,
    as they may in different company: the numbers are the same, their sums have another order.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._is_over = threading.Event()

    def start(self) -> None:
        """Run beside everything else, in a thread of the lowest priority. Then move memory that stays to huge pages."""
        threading.Thread(target=self._run_last, name="narrowing", daemon=True).start()

    def _run_last(self) -> None:
        give_way(MOST)
        try:
            self.run()
        except Exception:
            logger.exception("weights stay as they are")
        if self._module.device.type == "cpu":
            try:
                lay_in_huge_pages(is_over=self._is_over.is_set)
            except Exception:
                logger.exception("memory stays in small pages")

    def run(self) -> int:
        """Returns how many linears were exchanged. Takes 10 to 25 ns of a core for each of their weights."""
        began, count = time.monotonic(), 0
        for linear in _linears(self._module):
            if self._is_over.is_set():
                break
            count += _narrow(linear)
        if not self._is_over.is_set():
            count += self._narrow_head()
        give_back_freed_memory()
        if count:
            seconds = time.monotonic() - began
            logger.info("%s: %d linears keep 16 bits after %.1f s", type(self._module).__name__, count, seconds)
        return count

    def _narrow_head(self) -> bool:
        """Last, as nothing else takes as much memory meanwhile; with it the embedding that is read from it."""
        head, embedding = map(_base, (self._module.get_output_embeddings(), self._module.get_input_embeddings()))
        if not isinstance(head, PackedLinear):
            return False
        new = _half_of(head)
        if new is None or (isinstance(embedding, PackedEmbedding) and not embedding.narrow()):
            return False
        head.kept = new
        return True

    def stop(self) -> None:
        """End it behind the linear that it is at."""
        self._is_over.set()


def _linears(module: PreTrainedModel) -> Iterator[PackedLinear]:
    """Those of the decoder, what was joined as a whole. The head is none of them."""
    seen: set[int] = set()
    decoder: nn.Module = module.get_decoder()
    for each in list(decoder.modules()):
        linear = each.joint.whole if isinstance(each, LinearPart) else each
        if isinstance(linear, PackedLinear) and id(linear) not in seen:
            seen.add(id(linear))
            yield linear


def _base(module: Any) -> Any:
    """The module itself, where adapters may be wrapped around it."""
    return getattr(module, "base", module)


def _narrow(linear: PackedLinear) -> bool:
    """Whether the linear has its weight in 16 bits now."""
    new = _half_of(linear)
    if new is None:
        return False
    linear.kept = new
    return True


@torch.inference_mode()
def _half_of(linear: PackedLinear) -> HalfWeight | None:
    """Its weight in 16 bits; None where it is in these already, or that would lose something."""
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
