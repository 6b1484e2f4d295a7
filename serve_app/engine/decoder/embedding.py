"""Embeddings that are tied to a packed head: read where the head has them, so that no weight is there twice."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.engine.decoder.linears import PackedLinear

ROWS_PER_BLOCK = (64, 48, 32, 16, 8)
INPUTS_PER_STRIP = (1, 2, 4)
NUM_COMPARED = 509


class PackedEmbedding(nn.Module):
    """Rows of a packed linear's weight, by their numbers.

    oneDNN keeps a weight [outputs, inputs] as blocks of outputs, in which a strip of inputs of one output lies beside
    that of the next: [blocks, strips, outputs of a block, inputs of a strip]. `find` tries which; where none is right,
    nothing is read so.
    """

    packed: Tensor
    embed_scale: Tensor | None

    def __init__(self, head: PackedLinear, rows: Tensor, factor: Tensor | None) -> None:
        """rows: [blocks, outputs of a block, strips, inputs of a strip], a view of the head's memory"""
        super().__init__()
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self.register_buffer("packed", head.packed, persistent=False)
        self.register_buffer("embed_scale", factor, persistent=False)
        self._rows = (rows,)
        self._rows_per_block = rows.shape[1]

    @classmethod
    def find(cls, head: PackedLinear, embedding: nn.Embedding) -> PackedEmbedding | None:
        """The embedding, read from the head whose weight it is tied to; None where the head's memory is unknown.

        Compares some hundred rows, the first and the last among them.
        """
        count = embedding.num_embeddings
        compared = torch.unique(torch.linspace(0, count - 1, min(count, NUM_COMPARED)).long())
        expected = embedding(compared)
        for rows in _guesses(head):
            found = cls(head, rows, getattr(embedding, "embed_scale", None))
            if torch.equal(found(compared), expected):
                return found
        return None

    @property
    def weight(self) -> Tensor:
        """[rows, inputs], a plain copy."""
        return self.packed.to_dense()

    def read(self, ids: Tensor) -> Tensor:
        """ids: [...] int64. Returns [..., inputs]."""
        (rows,) = self._rows
        blocks = torch.div(ids, self._rows_per_block, rounding_mode="floor")
        return rows[blocks, ids - blocks * self._rows_per_block].flatten(-2)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.read(ids)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


def _guesses(head: PackedLinear) -> list[Tensor]:
    """A packed weight's memory, as it may have to be looked at."""
    if not hasattr(torch.ops.mkldnn, "data_ptr") or not hasattr(torch.ops.mkldnn, "_nbytes"):
        return []
    flat = _memory(head.packed)
    inputs, found = head.in_features, []
    for block in ROWS_PER_BLOCK:
        for strip in INPUTS_PER_STRIP:
            num_rows = -(-head.out_features // block) * block
            if inputs % strip == 0 and num_rows * inputs == flat.numel():
                found.append(flat.view(-1, inputs // strip, block, strip).transpose(1, 2))
    return found


def _memory(packed: Tensor) -> Tensor:
    """What a packed tensor has in memory, as a flat one; valid as long as it is there."""
    size: Any = torch.ops.mkldnn._nbytes(packed)
    start: Any = torch.ops.mkldnn.data_ptr(packed)
    return torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=packed.dtype)
