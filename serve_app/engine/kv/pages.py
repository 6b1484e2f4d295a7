"""Keys and values in pages: a block stays where it is, and running sequences share it.

All memory is taken at once, as accelerators want it. Attention gathers the pages that it reads, or is computed by
kernels that follow the block tables by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_app.engine.decoder.attention import GroupedPlan
from serve_app.engine.kv.page_plans import FlashInfer, FlashInferPlan, GatheredPlan, PagedPlan, plan_paged
from serve_app.engine.kv.storage import AttentionPlan, Group, Holding, KeyValueShape, Reading, runs, tiles
from serve_app.kernels.forms import Tiles
from serve_app.kernels.interface import Kernels, paged_kernels


class PageStorage:
    """A `Storage` for accelerators, and for tests on any device.

    keys, values: per layer [num_blocks + 1, block_size, heads, dim]; the last page is zeros for ever, where tables
    are padded
    kernels: whose compute attention, with torch's as the reference
    flashinfer: who is asked first, with any kernels; None is nobody, unless kernels says so
    max_model_len: the longest context, by which kernels share a long row out
    """

    shares_held = True
    piece_blocks = 1

    def __init__(
        self,
        shape: KeyValueShape,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels = "torch",
        max_model_len: int = 0,
        flashinfer: FlashInfer | None = None,
    ) -> None:
        self._has_triton = kernels != "torch"
        self._flashinfer = FlashInfer.on(device) if kernels == "flashinfer" and flashinfer is None else flashinfer
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._device = device
        pages = (num_blocks + 1, block_size)
        self._keys = [
            torch.zeros(*pages, each.heads, each.key_dim, dtype=dtype, device=device) for each in shape.layers
        ]
        self._values = [
            torch.zeros(*pages, each.heads, each.value_dim, dtype=dtype, device=device) for each in shape.layers
        ]

    def bring(self, holding: Holding, first: int, blocks: Sequence[int]) -> None:
        """Nothing: they are read where they are."""

    def copy(self, source: Holding, target: Holding, begin: int, end: int) -> None:
        first, last = begin // self._block_size, -(-end // self._block_size)
        sources = torch.tensor(source.blocks[first:last], device=self._device)
        targets = torch.tensor(target.blocks[first:last], device=self._device)
        for tensor in (*self._keys, *self._values):
            tensor.index_copy_(0, targets, tensor[sources])

    def claim(self, holding: Holding, blocks: Sequence[int]) -> None:
        ids = torch.tensor(blocks, device=self._device)
        for tensor in (*self._keys, *self._values):
            tensor.index_fill_(0, ids, 0)

    def keep(self, holding: Holding, indices: Sequence[int]) -> None:
        """Nothing: pages stay as they are until they are claimed."""

    def vacate(self, holding: Holding, first: int = 0) -> None:
        """Nothing."""

    def discard(self, blocks: Sequence[int]) -> None:
        """Nothing."""

    def places(self, holding: Holding, begin: int, end: int) -> Sequence[int]:
        size, blocks = self._block_size, holding.blocks
        return [blocks[position // size] * size + position % size for position in range(begin, end)]

    def plan(self, readings: Sequence[Reading], places: Tensor) -> AttentionPlan:
        if self._flashinfer is not None:
            return FlashInferPlan(
                self._flashinfer, self._keys, self._values, readings, places,
                others=lambda: self._own_plan(readings, places),
            )  # fmt: skip
        return self._own_plan(readings, places)

    def _own_plan(self, readings: Sequence[Reading], places: Tensor) -> AttentionPlan:
        if not self._has_triton:
            return GroupedPlan(self, self.groups(readings), places)
        split = paged_kernels().split_of(self._max_model_len)
        return plan_paged(self._keys, self._values, readings, places, split=split)

    def plan_tiles(self, tiles: Tiles, *, max_keys: int) -> AttentionPlan:
        """A plan of single queries over tensors that may be filled anew for every step; no query sees more keys."""
        if not self._has_triton:
            return GatheredPlan(self._keys, self._values, tiles, padding=self._num_blocks)
        split = paged_kernels().split_of(self._max_model_len)
        return PagedPlan(self._keys, self._values, tiles, max_keys=max_keys, split=split)

    @property
    def padding(self) -> int:
        """The page where tables are padded."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    def groups(self, readings: Sequence[Reading]) -> list[Group]:
        found: list[Group] = []
        singles = [each for each in readings if each.length == 1]
        by_length = sorted(singles, key=lambda each: (each.num_keys, each.place))
        for run in _runs_by_length(by_length):
            found.append(self._group_of(run))
        for reading in readings:
            if reading.length > 1:
                for group in tiles(reading, (0, 0)):
                    table = self._table([reading.blocks], group.num_keys)
                    found.append(
                        Group(
                            rows=table,
                            tokens=group.tokens,
                            filled=None,
                            length=group.length,
                            num_keys=group.num_keys,
                            starts=group.starts,
                        )
                    )
        return found

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        for pages, new in ((self._keys[layer], key), (self._values[layer], value)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, places, new)

    def read(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        assert isinstance(group.rows, Tensor)
        keys, values = self._keys[layer][group.rows], self._values[layer][group.rows]
        return keys.flatten(1, 2)[:, : group.num_keys], values.flatten(1, 2)[:, : group.num_keys]

    def _group_of(self, run: Sequence[Reading]) -> Group:
        num_keys = max(reading.num_keys for reading in run)
        return Group(
            rows=self._table([reading.blocks for reading in run], num_keys),
            tokens=torch.tensor([reading.first_token for reading in run], device=self._device),
            filled=None,
            length=1,
            num_keys=num_keys,
            starts=tuple(reading.start for reading in run),
        )

    def _table(self, tables: Sequence[Sequence[int]], num_keys: int) -> Tensor:
        """Block tables of equal width, [rows, blocks] int64."""
        width = -(-num_keys // self._block_size)
        padded = [[*table[:width], *[self._num_blocks] * (width - len(table))] for table in tables]
        return torch.tensor(padded, device=self._device)


def _runs_by_length(readings: Sequence[Reading]) -> list[list[Reading]]:
    """Readings ordered by length, cut where padding would cost more than a call."""
    numbered = [
        Reading(first_token=each.first_token, place=number, blocks=each.blocks, start=each.start, length=each.length)
        for number, each in enumerate(readings)
    ]
    return runs(numbered)
