"""Attention over pages by FlashInfer, an optional package: what it asks for, made of block tables, and who is asked.

Layers that it does not know, with sinks, chunks, or values of another size than keys, are computed by the kernels here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from serve_app.engine.kv.groups import Reading
from serve_app.engine.kv.plan import AttentionPlan, Scoring

How: TypeAlias = tuple[float, int | None, float | None]
"""Scale, window and softcap."""

WORKSPACE_BYTES = 256 << 20
"""For what its kernels keep of splits; all wrappers of a replica have the same, as one at a time is run."""


class Wrapper(Protocol):
    """What of `flashinfer.BatchPrefillWithPagedKVCacheWrapper` is used."""

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Indices:
    """A step's queries and pages, sequence by sequence, int32 in the host's memory, where FlashInfer plans.

    queries: [sequences + 1], where each one's tokens begin in the packed row, and the end
    pages:   [sequences + 1], where each one's begin among the numbers
    numbers: of pages
    last:    [sequences], positions in the last page of each, 1 at least
    """

    queries: Tensor
    pages: Tensor
    numbers: Tensor
    last: Tensor


class FlashInfer:
    """Has a wrapper for each way of scoring, which is planned once per step.

    make_wrapper: a new one
    """

    def __init__(self, make_wrapper: Callable[[], Wrapper]) -> None:
        self._make_wrapper = make_wrapper
        self._wrappers: dict[How, Wrapper] = {}

    @classmethod
    def on(cls, device: torch.device) -> FlashInfer:
        """Raises ImportError where it is not installed."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return cls(lambda: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"))

    def wrapper_of(self, scoring: Scoring) -> Wrapper:
        how = (scoring.scale, scoring.window, scoring.softcap)
        if how not in self._wrappers:
            self._wrappers[how] = self._make_wrapper()
        return self._wrappers[how]


class FlashInferPlan:
    """An `AttentionPlan` by FlashInfer.

    keys, values: per layer [blocks, block_size, kv_heads, dim], contiguous
    others: makes the plan that computes the layers which FlashInfer does not know
    """

    def __init__(
        self,
        flashinfer: FlashInfer,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        readings: Sequence[Reading],
        places: Tensor,
        *,
        others: Callable[[], AttentionPlan],
    ) -> None:
        self._flashinfer = flashinfer
        self._keys = keys
        self._values = values
        self._places = places
        self._indices = lay_indices(readings, block_size=keys[0].shape[1])
        self._planned: dict[How, Wrapper] = {}
        self._make_others = others
        self._others: AttentionPlan | None = None

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        if scoring.chunk is not None or scoring.sinks is not None or keys.shape != values.shape:
            self._others = self._others or self._make_others()
            return self._others.run(layer, query, key, value, scoring=scoring)
        if key is not None and value is not None:
            for pages, new in ((keys, key), (values, value)):
                pages.view(-1, *pages.shape[2:]).index_copy_(0, self._places, new)
        wrapper = self._planned_for(scoring, query, keys)
        return wrapper.run(query.contiguous(), (keys, values))

    def _planned_for(self, scoring: Scoring, query: Tensor, keys: Tensor) -> Wrapper:
        how = (scoring.scale, scoring.window, scoring.softcap)
        if how not in self._planned:
            wrapper = self._planned[how] = self._flashinfer.wrapper_of(scoring)
            wrapper.plan(
                qo_indptr=self._indices.queries,
                paged_kv_indptr=self._indices.pages,
                paged_kv_indices=self._indices.numbers.to(query.device),
                paged_kv_last_page_len=self._indices.last,
                num_qo_heads=query.shape[1],
                num_kv_heads=keys.shape[2],
                head_dim_qk=keys.shape[3],
                page_size=keys.shape[1],
                causal=True,
                sm_scale=scoring.scale,
                window_left=-1 if scoring.window is None else scoring.window - 1,
                logits_soft_cap=scoring.softcap or 0.0,
                q_data_type=query.dtype,
                kv_data_type=keys.dtype,
            )
        return self._planned[how]


def lay_indices(readings: Sequence[Reading], *, block_size: int) -> Indices:
    """readings: in the order of their tokens in the packed row, which they fill"""
    pages = [each.blocks[: -(-each.num_keys // block_size)] for each in readings]
    return Indices(
        queries=_begins(each.length for each in readings),
        pages=_begins(len(each) for each in pages),
        numbers=_int32([number for each in pages for number in each]),
        last=_int32([(each.num_keys - 1) % block_size + 1 for each in readings]),
    )


def _begins(lengths: Iterable[int]) -> Tensor:
    return _int32(list(accumulate(lengths, initial=0)))


def _int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
