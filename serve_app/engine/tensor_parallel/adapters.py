"""Adapters of a divided model: each shard has the part of their factors that belongs to its part of each linear."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace

from torch import nn

from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.kv.budget import check_adapters_fit
from serve_app.engine.lora.adapter import Adapter, LowRank
from serve_app.engine.lora.buckets import shelf_rank
from serve_app.engine.lora.pool import AdapterBank, SwapIn
from serve_app.engine.tensor_parallel.division import Division
from serve_app.engine.tensor_parallel.workers import Bring, Crew, Serve, packed, unpacked

Weights = dict[str, LowRank]
"""By the module's name."""


class PartBank(AdapterBank):
    """A bank that reads adapters whole and keeps its shard's part."""

    def __init__(self, model: nn.Module, adapters: Iterable[Adapter], *, division: Division, max_slots: int) -> None:
        super().__init__(model, adapters, max_slots=max_slots)
        self._division = division

    def _read(self, adapter: Adapter) -> Weights:
        return part_of(super()._read(adapter), self._division)


class LeadingBank(AdapterBank):
    """The first shard's, which alone reads files: who was swapped in here is swapped in everywhere, or nowhere."""

    def __init__(
        self,
        model: nn.Module,
        adapters: Iterable[Adapter],
        *,
        division: Division,
        crew: Crew,
        max_slots: int,
        uses_triton: bool = False,
    ) -> None:
        super().__init__(model, adapters, max_slots=max_slots, uses_triton=uses_triton)
        self._division = division
        self._crew = crew
        self._whole: Weights = {}

    def stage(self, slot: int, version: str) -> SwapIn:
        swap_in = super().stage(slot, version)
        parts = [packed(part_of(self._whole, self._division.of(number))) for number in range(1, self._crew.count)]
        self._whole = {}

        def swap_in_everywhere() -> None:
            swap_in()
            for number, weights in enumerate(parts, 1):
                self._crew.tell_one(number, Bring(slot=slot, version=version, weights=weights))

        return swap_in_everywhere

    def _read(self, adapter: Adapter) -> Weights:
        self._whole = super()._read(adapter)  # one call at a time, as `stage` is
        return part_of(self._whole, self._division)


class FollowingBank(AdapterBank):
    """A follower's, which is sent what it needs."""

    _received: Weights

    def receive(self, order: Bring) -> None:
        """Compute rows of this slot with an adapter from now on."""
        self._received = unpacked(order.weights)
        self.load(order.slot, order.version)

    def _read(self, adapter: Adapter) -> Weights:
        return self._received


def part_of(weights: Weights, division: Division) -> Weights:
    """What a shard has of an adapter's factors: of `up` where a module's outputs are cut, else of `down`."""
    parts: Weights = {}
    for name, each in weights.items():
        cut = division.cut(name)
        if cut is None:
            parts[name] = each
        elif cut.along == "outputs":
            parts[name] = replace(each, up=cut.weight(each.up))
        else:
            parts[name] = replace(each, down=cut.weight(each.down))
    return parts


def make_bank(config: EngineConfig, model: LoadedModel, adapters: Items[Adapter]) -> AdapterBank:
    """adapters: as they were bound, in each shard of a divided model

    Raises ModelNotSupported where keys and values leave no room for them.
    """
    shard = model.shard
    if shard is None or shard.crew is None:
        sizes = [_num_bytes(adapter, model) for adapter in adapters]
        check_adapters_fit(config, sizes, budget=model.kv_cache_bytes, vocab_size=model.vocab_size, device=model.device)
        return AdapterBank(model.module, adapters, max_slots=config.max_adapters, uses_triton=model.uses_triton)
    shard.crew.tell(Serve(versions=tuple(adapter.version for adapter in adapters)))
    return LeadingBank(
        model.module,
        adapters,
        division=shard.division,
        crew=shard.crew,
        max_slots=config.max_adapters,
        uses_triton=model.uses_triton,
    )


def _num_bytes(adapter: Adapter, model: LoadedModel) -> int:
    """What an adapter takes where it is resident."""
    num_entries = sum(change.num_entries_per_rank for change in adapter.changes.values())
    return shelf_rank(adapter.rank) * num_entries * model.dtype.itemsize
