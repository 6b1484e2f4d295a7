"""Attention over pages on CPUs: kernels of our own, torch for layers that they do not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from serve_app.engine.kv.storage import Group, GroupedPlan, Reading, Slots, Storage, attend_to_groups
from serve_app.kernels.forms import Scoring, Stretch
from serve_app.kernels.interface import attention_kernels

if TYPE_CHECKING:
    from serve_app.kernels.cpu.rows import RowsKernel
    from serve_app.kernels.cpu.tiles import TilesKernel

SHORT = 8
"""Up to so many queries of one sequence in a step are single rows: a token and the guesses behind it."""


class RowsPlan:
    """An `AttentionPlan` on CPUs: a kernel of our own for short spans, another for prompts.

    A layer that they do not know, with a cap, sinks or some sizes of heads, is torch's. The two add up in different
    orders, so the last bits of a token depend on whether its sequence computes more than `SHORT` in the step.

    layers:    of each its keys and its values
    groups_of: what torch attends to in one call each
    """

    def __init__(
        self,
        storage: Storage,
        layers: Sequence[tuple[Slots, Slots]],
        readings: Sequence[Reading],
        places: Tensor,
        *,
        groups_of: Callable[[Sequence[Reading]], list[Group]],
    ) -> None:
        self._storage = storage
        self._layers = layers
        self._block_size = layers[0][0].pages.shape[1]
        self._groups_of = groups_of
        self._places = places
        self._readings = readings
        self._short = [each for each in readings if each.length <= SHORT]
        self._long = [each for each in readings if each.length > SHORT]
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}
        self._laid: dict[tuple[object, ...], list[Any]] = {}

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        keys, values = self._layers[layer]
        rows, prompts = kernels_of(query, keys.flat, values.flat, scoring)
        if rows is None or not (prompts or self._short):
            return self._by_torch.run(layer, query, key, value, scoring=scoring)
        written, read = self._slots_of(keys)
        if key is not None and value is not None:
            keys.flat.index_copy_(0, written, key)
            values.flat.index_copy_(0, written, value)
        output = query.new_empty(query.shape)
        for kernel, readings in ((rows, self._short), (prompts, self._long)):
            if kernel is None or not readings:
                continue
            for laid in self._laid_for(kernel, readings, scoring):
                kernel.run(query, keys.flat, values.flat, read, laid, output, scale=scoring.scale)
        if prompts is None:
            return attend_to_groups(self._storage, self._groups, layer, query, scoring=scoring, output=output)
        return output

    def _slots_of(self, keys: Slots) -> tuple[Tensor, Tensor]:
        """Return the slots of the step's tokens, and of what short readings see, and then long ones, whole blocks."""
        if keys.spacing not in self._slots:
            size = self._block_size
            blocks = [block for each in (*self._short, *self._long) for block in _blocks_of(each, size)]
            read = (torch.tensor(blocks)[:, None] * keys.spacing + torch.arange(size)).flatten()
            self._slots[keys.spacing] = keys.numbers(self._places), read
        return self._slots[keys.spacing]

    def _laid_for(self, kernel: RowsKernel | TilesKernel, readings: Sequence[Reading], scoring: Scoring) -> list[Any]:
        """Return what the kernel is run for, as layers share it."""
        name = kernel, scoring.window, scoring.chunk
        if name not in self._laid:
            size, before = self._block_size, () if readings is self._short else self._short
            first = size * sum(len(_blocks_of(each, size)) for each in before)
            stretches = stretches_of(readings, size, first=first, window=scoring.window, chunk=scoring.chunk)
            self._laid[name] = [*kernel.lay(stretches)]
        return self._laid[name]

    @cached_property
    def _groups(self) -> list[Group]:
        return self._groups_of(self._long)

    @cached_property
    def _by_torch(self) -> GroupedPlan:
        return GroupedPlan(self._storage, self._groups_of(self._readings), self._places)


def kernels_of(
    query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
) -> tuple[RowsKernel | None, TilesKernel | None]:
    """Return the kernels for such a layer, if there are any: of short spans, and of prompts."""
    if scoring.softcap is not None or scoring.sinks is not None or keys.shape != values.shape:
        return None, None
    heads, kv_heads = query.shape[1], keys.shape[1]
    if query.dtype != keys.dtype or heads % kv_heads:
        return None, None
    return attention_kernels(heads // kv_heads, query.shape[2], query.dtype)


def stretches_of(
    readings: Sequence[Reading], block_size: int, *, first: int, window: int | None, chunk: int | None
) -> list[Stretch]:
    """Return what each query sees; positions are among the slots of all blocks, from the first one's on."""
    found = []
    for reading in readings:
        bounds = []
        for position in range(reading.start, reading.num_keys):
            in_window = 0 if window is None else position + 1 - window
            in_chunk = 0 if chunk is None else position - position % chunk
            bounds.append((max(0, in_window, in_chunk), position + 1))
        found.append(Stretch(token=reading.first_token, position=first, bounds=bounds))
        first += len(_blocks_of(reading, block_size)) * block_size
    return found


def _blocks_of(reading: Reading, block_size: int) -> Sequence[int]:
    """Return the blocks that a reading sees."""
    return reading.blocks[: -(-reading.num_keys // block_size)]
