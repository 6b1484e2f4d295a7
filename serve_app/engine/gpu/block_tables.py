"""The block tables of all places on the device: a step sends only what they have gained since the last one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_app.engine.decoder.crossing import sent
from serve_app.engine.kv.groups import Reading

FIRST_TOKENS = 4096
"""Which a table has room for at first; every time that is too little it is twice as wide."""


class BlockTables:
    """Rows by place. A holding's blocks are only ever appended to, and another holding has a list of its own.

    tensor: [places, width] int32; another one when it has grown
    """

    def __init__(
        self, *, num_places: int, max_blocks: int, block_size: int, padding: int, device: torch.device
    ) -> None:
        self._max_blocks = max_blocks
        self._block_size = block_size
        self._padding = padding
        self._known: dict[int, tuple[Sequence[int], int]] = {}
        width = min(max_blocks, max(1, FIRST_TOKENS // block_size))
        self.tensor = self._of_width(num_places, width, device)

    @property
    def width(self) -> int:
        return self.tensor.shape[1]

    @property
    def max_keys(self) -> int:
        """Positions that a row has room for."""
        return self.width * self._block_size

    def catch_up(self, readings: Sequence[Reading]) -> None:
        """Bring the rows of these up to date."""
        needed = max(len(each.blocks) for each in readings)
        if needed > self.width:
            self._grow(needed)
        at: list[int] = []
        numbers: list[int] = []
        for each in readings:
            blocks, count = self._known.get(each.place, (each.blocks, 0))
            begin = count if blocks is each.blocks else 0
            end = len(each.blocks)
            if begin < end:
                first = each.place * self.width
                at += range(first + begin, first + end)
                numbers += each.blocks[begin:end]
                self._known[each.place] = (each.blocks, end)
        if at:
            places, blocks_there = sent(torch.tensor([at, numbers]), self.tensor.device)
            self.tensor.view(-1).index_copy_(0, places, blocks_there.to(torch.int32))

    def _grow(self, needed: int) -> None:
        width = min(self._max_blocks, 1 << (needed - 1).bit_length())
        assert width >= needed, f"{needed} blocks of one row, {self._max_blocks} at most"
        self.tensor = self._of_width(self.tensor.shape[0], width, self.tensor.device)
        self._known.clear()

    def _of_width(self, num_places: int, width: int, device: torch.device) -> Tensor:
        return torch.full((num_places, width), self._padding, dtype=torch.int32, device=device)
