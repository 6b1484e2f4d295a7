"""Embeddings that are tied to a packed head: read where the head has them, so that no weight is there twice."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.decoder.linears import OneDnnWeight, PackedLinear

ROWS_PER_BLOCK = (64, 48, 32, 16, 8)
INPUTS_PER_STRIP = (1, 2, 4)
NUM_COMPARED = 509
ROWS_AT_ONCE = 4096


class PackedEmbedding(nn.Module):
    """Rows of a packed linear's weight, by their numbers.

    oneDNN keeps a weight [outputs, inputs] as blocks of outputs, in which a strip of inputs of one output lies beside
    that of the next: [blocks, strips, outputs of a block, inputs of a strip]. `find` tries which; where none is right,
    nothing is read so.
    """

    embed_scale: Tensor | None

    def __init__(self, kept: OneDnnWeight, rows: Tensor, factor: Tensor | None) -> None:
        """rows: [blocks, outputs of a block, strips, inputs of a strip], a view of the head's memory"""
        super().__init__()
        self.embedding_dim = rows.shape[2] * rows.shape[3]
        self.num_embeddings = len(kept.packed)
        self.register_buffer("embed_scale", factor, persistent=False)
        self._dtype = kept.dtype
        self._read: Callable[[Tensor], Tensor] = BlockedRows(kept, rows)

    @classmethod
    def find(cls, head: PackedLinear, embedding: nn.Embedding) -> PackedEmbedding | None:
        """The embedding, read from the head whose weight it is tied to; None where the head's memory is unknown.

        Compares some hundred rows, the first and the last among them.
        """
        count = embedding.num_embeddings
        compared = torch.unique(torch.linspace(0, count - 1, min(count, NUM_COMPARED)).long())
        expected = embedding(compared)
        kept = head.kept
        if not isinstance(kept, OneDnnWeight):
            return None
        for rows in _guesses(kept):
            found = cls(kept, rows, getattr(embedding, "embed_scale", None))
            if torch.equal(found(compared), expected):
                return found
        return None

    @property
    def weight(self) -> Tensor:
        """[rows, inputs], a plain copy."""
        return self.read(torch.arange(self.num_embeddings))

    def read(self, ids: Tensor) -> Tensor:
        """ids: [...] int64. Returns [..., inputs]."""
        return self._read(ids).to(self._dtype)

    def narrow(self) -> bool:
        """Keep the rows in 16 bits of their own, if they are the same in them: the head's memory is not needed then."""
        for dtype in (torch.bfloat16, torch.float16):
            rows = torch.empty(self.num_embeddings, self.embedding_dim, dtype=dtype)
            for ids in torch.arange(self.num_embeddings).split(ROWS_AT_ONCE):
                wide = self.read(ids)
                rows[ids[0] : ids[-1] + 1] = wide
                if not torch.equal(rows[ids[0] : ids[-1] + 1].to(wide.dtype), wide):
                    break
            else:
                self._read = PlainRows(rows)
                return True
        return False

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.read(ids)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


class BlockedRows:
    """Rows in the memory of a packed weight, which is there as long as this is."""

    def __init__(self, kept: OneDnnWeight, rows: Tensor) -> None:
        self._kept = kept
        self._rows = rows
        self._rows_per_block = rows.shape[1]

    def __call__(self, ids: Tensor) -> Tensor:
        blocks = torch.div(ids, self._rows_per_block, rounding_mode="floor")
        return self._rows[blocks, ids - blocks * self._rows_per_block].flatten(-2)


class PlainRows:
    """Rows one behind the other."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._rows)


def _guesses(kept: OneDnnWeight) -> list[Tensor]:
    """A packed weight's memory, as it may have to be looked at."""
    if not hasattr(torch.ops.mkldnn, "data_ptr") or not hasattr(torch.ops.mkldnn, "_nbytes"):
        return []
    flat = _memory(kept.packed)
    outputs, inputs = kept.packed.shape
    found = []
    for block in ROWS_PER_BLOCK:
        for strip in INPUTS_PER_STRIP:
            num_rows = -(-outputs // block) * block
            if inputs % strip == 0 and num_rows * inputs == flat.numel():
                found.append(flat.view(-1, inputs // strip, block, strip).transpose(1, 2))
    return found


def _memory(packed: Tensor) -> Tensor:
    """What a packed tensor has in memory, as a flat one; valid as long as it is there."""
    size: Any = torch.ops.mkldnn._nbytes(packed)
    start: Any = torch.ops.mkldnn.data_ptr(packed)
    return torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=packed.dtype)
