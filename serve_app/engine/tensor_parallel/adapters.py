"""Adapters of a divided model: each shard holds the factors of its part of each linear."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from torch import nn

from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.kv.budget import adapter_budget, check_adapters_fit
from serve_app.engine.lora.adapter import Adapter, LowRank, frame_of, linear_modules
from serve_app.engine.lora.matching import head_name
from serve_app.engine.lora.pool import AdapterBank, SwapIn
from serve_app.engine.tensor_parallel.division import Division, part_of
from serve_app.engine.tensor_parallel.workers import (
    AdmitAdapter,
    BringAdapter,
    DropAdapter,
    Serve,
    Workers,
    packed,
    unpacked,
)

Weights = dict[str, LowRank]
"""By the module's name."""
USUAL_RANK = 64
"""Of adapters that nobody has seen yet, when memory for them is set aside."""


class LeaderBank(AdapterBank):
    """The first shard's bank. It alone reads files, and sends each worker its part when an adapter is swapped in."""

    _division: Division

    def __init__(
        self,
        model: nn.Module,
        adapters: Iterable[Adapter],
        *,
        division: Division,
        workers: Workers,
        max_slots: int,
        uses_triton: bool = False,
    ) -> None:
        super().__init__(model, adapters, max_slots=max_slots, uses_triton=uses_triton, division=division)
        self._workers = workers
        self._whole: Weights = {}

    def admit(self, adapter: Adapter) -> bool:
        self._workers.tell(AdmitAdapter(adapter=adapter))
        return super().admit(adapter)

    def drop(self, version: str) -> None:
        self._workers.tell(DropAdapter(version=version))
        super().drop(version)

    def stage(self, slot: int, version: str) -> SwapIn:
        swap_in = super().stage(slot, version)
        parts = [packed(part_of(self._whole, self._division.of(number))) for number in range(1, self._workers.count)]
        self._whole = {}

        def swap_in_everywhere() -> None:
            swap_in()
            for number, weights in enumerate(parts, 1):
                self._workers.tell_one(number, BringAdapter(slot=slot, version=version, weights=weights))

        return swap_in_everywhere

    def _read(self, adapter: Adapter) -> Weights:
        self._whole = super()._read(adapter)  # one call at a time, as `stage` is
        return self._whole


class WorkerBank(AdapterBank):
    """A worker's bank. It is sent its parts of adapters."""

    received: Weights

    def receive(self, order: BringAdapter) -> None:
        """Put a received adapter into its slot."""
        self.received = unpacked(order.weights)
        self.load(order.slot, order.version)

    def _read(self, adapter: Adapter) -> Weights:
        return self.received


def make_bank(config: EngineConfig, model: LoadedModel, adapters: Items[Adapter]) -> AdapterBank:
    """Make the adapter bank of a model, and get the workers of a divided model ready for steps.

    adapters: as they were bound, in each shard of a divided model

    Raises ModelNotSupported where keys and values leave no room for them.
    """
    shard = model.shard
    if shard is None or shard.workers is None:
        bank = AdapterBank(model.module, adapters, max_slots=config.max_adapters, uses_triton=model.uses_triton)
        sizes = [bank.bytes_of(adapter.version) for adapter in adapters]
        check_adapters_fit(config, sizes, budget=model.kv_cache_bytes, vocab_size=model.vocab_size, device=model.device)
    else:
        shard.workers.tell(Serve(versions=tuple(adapter.version for adapter in adapters)))
        bank = LeaderBank(
            model.module,
            adapters,
            division=shard.division,
            workers=shard.workers,
            max_slots=config.max_adapters,
            uses_triton=model.uses_triton,
        )
    sizes = [bank.bytes_of(adapter.version) for adapter in adapters]
    bank.max_bytes = adapter_budget(config, sizes, usual=_usual_bytes(model), device=model.device)
    return bank


def _usual_bytes(model: LoadedModel) -> int:
    """Return the bytes of an adapter of all linears but the head, in this shard."""
    head = head_name(model.module)
    linears = linear_modules(model.module).items()
    frames = [frame_of(each) for name, each in linears if name.removesuffix(".base") != head]
    return USUAL_RANK * sum(sum(frame.shape) for frame in frames) * model.dtype.itemsize
