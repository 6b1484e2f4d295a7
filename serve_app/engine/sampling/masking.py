"""Takes tokens that a constraint does not allow out of play."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from serve_app.engine.decoder.host_copies import sent

BYTE_BITS, WORD_BITS = 8, 32


class Exhausted:
    """Nothing is left to draw: whatever the constraint allows, something else forbids."""


EXHAUSTED = Exhausted()


def is_allowed(bits: Tensor, token_id: int) -> bool:
    """Of one row's bits, [words] int32."""
    return bool(int(bits[token_id // 32]) >> (token_id % 32) & 1)


def restrict(logits: Tensor, bits: Tensor) -> Tensor:
    """A copy in which what is not allowed is -inf, whatever it was; what is allowed stays as it is.

    logits: [rows, vocab];  bits: [rows, words] int32, see `StepMasks`
    """
    return torch.where(unpacked(bits, logits.shape[-1]).to(logits.device), logits, -inf)


def unpacked(bits: Tensor, vocab: int) -> Tensor:
    """[rows, words] int32 -> [rows, vocab] bool, eight at a time from a table."""
    places = bits.view(torch.uint8).int()
    eights = torch.index_select(_TABLE, 0, places.view(-1))
    return eights.view(torch.bool).view(len(bits), -1)[:, :vocab]


def allowed_on(device: torch.device, bits: Tensor, vocab: int) -> Tensor:
    """As `unpacked`, on a device: what is sent there are the bits."""
    words = sent(bits, device)
    flags = (words[:, :, None] >> torch.arange(WORD_BITS, dtype=torch.int32, device=device)) & 1
    return flags.flatten(1)[:, :vocab].bool()


def _table() -> Tensor:
    """[256] int64, each eight booleans side by side: the bits of a byte, lowest first."""
    bits = (torch.arange(256)[:, None] >> torch.arange(BYTE_BITS)) & 1
    return bits.bool().view(torch.int64)[:, 0].clone()


_TABLE = _table()
