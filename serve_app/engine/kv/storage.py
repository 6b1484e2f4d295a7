"""The interface between the block ledger and the tensors of keys and values, and attention over them by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.kernels.forms import Scoring


@dataclass(slots=True, eq=False)
class Holding:
    """One running sequence's part of the store.

    place:  its number among those that run; the lowest free one when it came
    blocks: its block table, a block per `block_size` positions
    names:  hashes of its first full blocks, as far as they were taken
    """

    place: int
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)


class Storage(Protocol):
    """Keeps the contents of blocks, and reads and writes them for attention.

    The ledger decides which block is whose; a storage only carries that out.
    """

    def claim(self, blocks: Sequence[int]) -> None:
        """Zero blocks that were just taken: what a mask hides is still multiplied, by zero, and must be finite."""

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy a block's first positions to another's."""

    def discard(self, blocks: Sequence[int]) -> None:
        """Give back the memory of free blocks, where that can be. Their contents are void."""

    def places(self, holding: Holding, begin: int, end: int) -> Sequence[int]:
        """Return where positions begin … end-1 are written: block times `block_size`, and which of the block's."""

    def plan(self, readings: Sequence[Reading], places: Tensor) -> AttentionPlan:
        """Prepare one step's attention.

        readings: in the order of their tokens in the packed row;  places: [tokens], where those are written
        """

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Write one layer's new keys and values; key, value: [tokens, heads, dim]."""

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return one layer's keys and values of a table of blocks, each [rows, positions, heads, dim]."""


@dataclass(frozen=True, slots=True)
class Slots:
    """One layer's keys or values.

    pages:   [blocks, block_size, heads, dim]
    flat:    the same memory, [slots, heads, dim], in which a block's positions follow one another
    spacing: slots from one block to the next
    """

    pages: Tensor
    flat: Tensor
    spacing: int

    @classmethod
    def of(cls, pages: Tensor) -> Slots:
        """Return the slots of such pages. Between two of them may lie those of other layers."""
        (blocks, size), (block_stride, stride) = pages.shape[:2], pages.stride()[:2]
        spacing = block_stride // stride
        flat = pages.as_strided(((blocks - 1) * spacing + size, *pages.shape[2:]), pages.stride()[1:])
        return cls(pages, flat, spacing)

    def numbers(self, places: Tensor) -> Tensor:
        """Return the slots of places, as a `Storage` numbers those."""
        size = self.pages.shape[1]
        return places if self.spacing == size else places // size * self.spacing + places % size

    def write(self, places: Tensor, new: Tensor) -> None:
        self.flat.index_copy_(0, self.numbers(places), new)


class AttentionPlan(Protocol):
    """One step's attention, prepared once for all layers by the storage that it reads."""

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        """Write one layer's new keys and values, if it has any, and attend to all that each query sees.

        layer: as the storage counts them
        query: [tokens, heads, key_dim];  key, value: [tokens, kv_heads, dim], in any strides; None where the layer
        reads what another has written

        Returns [tokens, heads, value_dim].
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Keys and values of one position in one layer."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueShape:
    """Keys and values of one position, layer by layer; layers may differ.

    layers: what is kept, in the order of the model's layers
    places: where in `layers` the keys and values of a model's layer are, by the layer's number, where that is not the
            number itself: layers that attend to an earlier one's, and those behind a layer that keeps none
    readers: layers that attend to what another has written
    """

    layers: tuple[LayerShape, ...]
    places: Mapping[int, int] = field(default_factory=dict)
    readers: frozenset[int] = frozenset()

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return sum(each.heads * (each.key_dim + each.value_dim) for each in self.layers) * dtype.itemsize


MAX_CHUNK_ROWS = 256
"""Queries of a chunk that are attended to at once, so that masks stay small."""
CALL_POSITIONS = 768
"""What one more call of attention costs, in positions of one sequence that could be read meanwhile (measured on CPUs
at 2 heads of 64 and at 2 of 32: 400 to 1200)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Queries of one sequence in a step, `length` of them from position `start` on.

    first_token: where they begin in the packed row
    place, blocks: of the sequence's holding
    """

    first_token: int
    place: int
    blocks: Sequence[int]
    start: int
    length: int

    @property
    def num_keys(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Queries attended to in one call: `length` of each row, over the first `num_keys` positions of each row.

    rows:   a table of blocks, [rows, blocks] int64; groups of one sequence have one table, which may be longer
    tokens: the packed tokens of the queries, [rows * length] int64, or a slice where they lie side by side
    starts: position of each row's first query
    masks:  what was built for this step so far, by window, chunk and element type
    """

    rows: Tensor
    tokens: slice | Tensor
    length: int
    num_keys: int
    starts: tuple[int, ...]
    masks: dict[tuple[int | None, int | None, torch.dtype], Tensor | None] = field(default_factory=dict, compare=False)

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    def queries(self, packed: Tensor) -> Tensor:
        """Return the group's part of [tokens, heads, dim], as [rows, length, heads, dim]."""
        return packed[self.tokens].view(self.num_rows, self.length, *packed.shape[1:])

    def put(self, packed: Tensor, attended: Tensor) -> None:
        """Write [rows, length, heads, dim] to the group's tokens of [tokens, heads, dim]."""
        packed[self.tokens] = attended.reshape(self.num_rows * self.length, *attended.shape[2:])

    def mask(
        self, window: int | None, dtype: torch.dtype, device: torch.device, *, chunk: int | None = None
    ) -> Tensor | None:
        """Return what is added to scores, [rows, 1, length, keys]: 0 if a query sees a key, else -inf; None is all 0.

        window: a query sees itself and so many positions before it less one; None sees all before it
        chunk:  a query sees nothing before the last multiple of it; None has no such border
        """
        if (window, chunk, dtype) not in self.masks:
            self.masks[window, chunk, dtype] = self._build_mask(window, chunk, dtype, device)
        return self.masks[window, chunk, dtype]

    def _build_mask(
        self, window: int | None, chunk: int | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        fits_window = window is None or self.num_keys <= window
        fits_chunk = chunk is None or self.num_keys <= chunk
        if self.length == 1 and fits_window and fits_chunk and all(start + 1 == self.num_keys for start in self.starts):
            return None
        window, chunk = None if fits_window else window, None if fits_chunk else chunk
        starts = torch.tensor(self.starts, device=device)
        return mask_of(starts, self.length, self.num_keys, window=window, chunk=chunk, dtype=dtype)


def mask_of(
    starts: Tensor, length: int, num_keys: int, *, window: int | None, chunk: int | None, dtype: torch.dtype
) -> Tensor:
    """Return what is added to scores, [rows, 1, length, num_keys]: 0 where a query sees a key, else -inf.

    starts: [rows], the position of each row's first query
    """
    queries = starts[:, None] + torch.arange(length, device=starts.device)  # [rows, length]
    keys = torch.arange(num_keys, device=starts.device)
    hidden = keys > queries[:, :, None]
    if window is not None:
        hidden |= keys <= queries[:, :, None] - window
    if chunk is not None:
        hidden |= keys < (queries - queries % chunk)[:, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=starts.device).masked_fill_(hidden, -torch.inf)[:, None]


def tiles(reading: Reading, rows: Tensor) -> list[Group]:
    """Cut a chunk of one sequence into pieces whose masks stay small."""
    groups = []
    for offset in range(0, reading.length, MAX_CHUNK_ROWS):
        length = min(MAX_CHUNK_ROWS, reading.length - offset)
        first, start = reading.first_token + offset, reading.start + offset
        groups.append(
            Group(
                rows=rows,
                tokens=slice(first, first + length),
                length=length,
                num_keys=start + length,
                starts=(start,),
            )
        )
    return groups


def runs(readings: Sequence[Reading]) -> list[list[Reading]]:
    """Cut single queries, by rising number of keys, into runs that are cheaper to attend to together than apart.

    A run costs its longest row for each of its rows, and one call.
    """
    found: list[list[Reading]] = []
    for reading in readings:
        if found:
            run = found[-1]
            wasted = (reading.num_keys - run[-1].num_keys) * len(run)
            if wasted <= CALL_POSITIONS:
                run.append(reading)
                continue
        found.append([reading])
    return found


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """A plan that reads each group's keys and values from its storage, and attends in torch's own operations."""

    storage: Storage
    groups: Sequence[Group]
    places: Tensor

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        if key is not None and value is not None:
            self.storage.write(layer, self.places, key, value)
        return attend_to_groups(self.storage, self.groups, layer, query, scoring=scoring)


def attend_to_groups(
    storage: Storage,
    groups: Sequence[Group],
    layer: int,
    query: Tensor,
    *,
    scoring: Scoring,
    output: Tensor | None = None,
) -> Tensor:
    """Return an output with what the groups' queries make of a layer; of the given one the other tokens stay."""
    rows: Tensor | None = None
    for group in groups:
        if group.rows is not rows:
            rows = group.rows
            keys, values = storage.read(layer, rows)
        mask = group.mask(scoring.window, query.dtype, query.device, chunk=scoring.chunk)
        attended = attend(
            group.queries(query), keys[:, : group.num_keys], values[:, : group.num_keys],
            mask=mask, scale=scoring.scale, softcap=scoring.softcap, sinks=scoring.sinks,
        )  # fmt: skip
        output = query.new_empty(*query.shape[:2], attended.shape[-1]) if output is None else output
        group.put(output, attended)
    assert output is not None, "a step has tokens"
    return output


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend; query heads share key heads in equal parts, in their order.

    query: [rows, length, heads, dim];  key, value: [rows, keys, kv_heads, dim]
    mask:  [rows, 1, length, keys], added to the scores;  sinks: [heads], logits of nothing
    softcap bounds the scores to ±softcap by tanh (Gemma 2, arXiv 2408.00118)

    Returns [rows, length, heads, value_dim].
    """
    if softcap is None and sinks is None:
        if query.shape[1] == 1:
            return _attend_once(query, key, value, mask=mask, scale=scale)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return attended.transpose(1, 2)
    return _attend_plainly(query, key, value, mask=mask, scale=scale, softcap=softcap, sinks=sinks)


def _attend_once(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
    """One query per row: the heads that share a key head become its queries, so that keys are read once."""
    rows, _, heads, dim = query.shape
    folded = query.view(rows, key.shape[2], -1, dim)
    attended = F.scaled_dot_product_attention(
        folded, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return attended.reshape(rows, 1, heads, -1)


def _attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend in single operations, for what the fused kernel does not know."""
    rows, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    folded = query.view(rows, length, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)  # [rows, kv, group, length, dim]
    scores = (folded @ key.permute(0, 2, 3, 1)[:, :, None]) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float()
    if mask is not None:
        scores = scores + mask[:, :, None]
    if sinks is not None:
        column = sinks.view(1, kv_heads, -1, 1, 1).expand(rows, -1, -1, length, 1)
        weights = torch.softmax(torch.cat([scores, column.to(scores.dtype)], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    attended = weights.to(value.dtype) @ value.permute(0, 2, 1, 3)[:, :, None]
    return attended.permute(0, 3, 1, 2, 4).reshape(rows, length, heads, -1)
