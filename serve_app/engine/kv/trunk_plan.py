"""Attention of rows that share a prefix: to what they share in one product, to what is their own apart, merged exactly.

Softmax over two parts of the keys is the mean of the softmaxes over each, weighted by their sums of exponentials, which
the kernel gives as logarithms (Hydragen, arXiv 2402.05099; cascade inference of FlashInfer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from serve_app.engine.decoder.attention import GroupedPlan, attend
from serve_app.engine.kv.groups import Group, Reading
from serve_app.engine.kv.plan import Scoring
from serve_app.engine.kv.storage import Storage
from serve_app.engine.kv.trunks import Trunk


class LaneReader(Storage, Protocol):
    """A storage where any stretch of a place's keys and values can be read without a copy."""

    def read_place(self, layer: int, place: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """One layer's first keys and values of a place, each [keys, heads, dim]."""
        ...


@dataclass(frozen=True, slots=True)
class _Shared:
    """A trunk and its rows.

    place: whose lane it is read from;  tokens: of the rows' queries, [rows] int64;  own: what each row reads of its own
    """

    place: int
    num_keys: int
    tokens: Tensor
    own: tuple[Group, ...]


class TrunkPlan:
    """A plan in which the rows of each trunk attend to it together.

    The kernel that tells sums of exponentials knows no cap, no sinks and one size of head; and where a window hides a
    part of somebody's keys the layer is computed as if nobody shared anything.
    """

    def __init__(
        self, storage: LaneReader, readings: Sequence[Reading], trunks: Sequence[Trunk], places: Tensor
    ) -> None:
        self._storage = storage
        self._readings = readings
        self._places = places
        self._num_keys = max(each.num_keys for each in readings)
        self._apart: GroupedPlan | None = None
        in_trunks = {each.first_token for trunk in trunks for each in trunk.readings}
        self._others = storage.groups([each for each in readings if each.first_token not in in_trunks])
        self._shared = [_shared(storage, trunk) for trunk in trunks]

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        if not self._fits(layer, scoring):
            return self._plan_apart().run(layer, query, key, value, scoring=scoring)
        if key is not None and value is not None:
            self._storage.write(layer, self._places, key, value)
        output = query.new_empty(query.shape)
        for group in self._others:
            keys, values = self._storage.read(layer, group)
            mask = group.mask(None, query.dtype, query.device)
            group.put(output, attend(group.queries(query), keys, values, mask=mask, scale=scoring.scale))
        for shared in self._shared:
            self._run_shared(layer, shared, query, output, scoring.scale)
        return output

    def _run_shared(self, layer: int, shared: _Shared, query: Tensor, output: Tensor, scale: float) -> None:
        totals = query.new_empty(*query.shape[:2], 1, dtype=torch.float32)
        for group in shared.own:
            keys, values = self._storage.read(layer, group)
            mask = group.mask(None, query.dtype, query.device)
            attended, total = attend_each(group.queries(query), keys, values, mask=mask, scale=scale)
            group.put(output, attended)
            group.put(totals, total)
        keys, values = self._storage.read_place(layer, shared.place, shared.num_keys)
        tokens = shared.tokens
        trunk, trunk_total = attend_together(query[tokens], keys, values, scale=scale)
        share = torch.sigmoid(trunk_total - totals[tokens])
        output[tokens] = torch.lerp(output[tokens].float(), trunk.float(), share).to(output.dtype)

    def _fits(self, layer: int, scoring: Scoring) -> bool:
        keys, values = self._storage.read_place(layer, 0, 1)
        borders = [border for border in (scoring.window, scoring.chunk) if border is not None]
        sees_all = self._num_keys <= min(borders, default=self._num_keys)
        return sees_all and scoring.softcap is None and scoring.sinks is None and keys.shape == values.shape

    def _plan_apart(self) -> GroupedPlan:
        if self._apart is None:
            self._apart = GroupedPlan(self._storage, self._storage.groups(self._readings), self._places)
        return self._apart


def attend_together(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to the same keys with all rows at once, so that they are read once.

    query: [rows, heads, dim];  key, value: [keys, kv_heads, dim]
    Returns [rows, heads, dim] and ln of the sums of exponentials, [rows, heads, 1] float32.
    """
    rows, heads, dim = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(rows, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    attended, total = _flash(folded, key[None].transpose(1, 2), value[None].transpose(1, 2), None, scale)
    unfolded = attended.reshape(kv_heads, rows, -1, dim).transpose(0, 1)
    totals = total.reshape(kv_heads, rows, -1, 1).transpose(0, 1)
    return unfolded.reshape(rows, heads, dim), totals.reshape(rows, heads, 1)


def attend_each(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """As `attend` for one query per row, and ln of the sums of exponentials, [rows, 1, heads, 1] float32."""
    rows, _, heads, dim = query.shape
    folded = query.reshape(rows, key.shape[2], -1, dim)
    attended, total = _flash(folded, key.transpose(1, 2), value.transpose(1, 2), mask, scale)
    return attended.reshape(rows, 1, heads, dim), total.reshape(rows, 1, heads, 1)


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """torch's own kernel for CPUs, asked for both of its results; [rows, heads, length, dim] each."""
    attended, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=scale
    )
    return attended, total


def _shared(storage: Storage, trunk: Trunk) -> _Shared:
    own = [replace(each, start=each.start - trunk.num_keys) for each in trunk.readings]
    groups = tuple(replace(group, first_key=trunk.num_keys) for group in storage.groups(own))
    tokens = torch.tensor([each.first_token for each in trunk.readings])
    return _Shared(min(each.place for each in trunk.readings), trunk.num_keys, tokens, groups)
