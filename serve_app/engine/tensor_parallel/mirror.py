"""A storage whose deeds other shards carry out on theirs: one ledger decides for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from serve_app.engine.kv.storage import AttentionPlan, Group, Holding, Reading, Storage
from serve_app.engine.tensor_parallel.orders import Deed


class MirroredStorage:
    """The first shard's `Storage`. What each call does is noted; reading and writing are each shard's own affair.

    note: takes a deed, to be carried out by the others before their next step
    """

    def __init__(self, own: Storage, note: Callable[[Deed], None]) -> None:
        self._own = own
        self._note = note
        self.shares_held = own.shares_held
        self.piece_blocks = own.piece_blocks

    def bring(self, holding: Holding, first: int, blocks: Sequence[int]) -> None:
        self._own.bring(holding, first, blocks)
        self._note(Deed(call="bring", arguments=(_copy(holding), first, [*blocks])))

    def copy(self, source: Holding, target: Holding, begin: int, end: int) -> None:
        self._own.copy(source, target, begin, end)
        self._note(Deed(call="copy", arguments=(_copy(source), _copy(target), begin, end)))

    def claim(self, holding: Holding, blocks: Sequence[int]) -> None:
        self._own.claim(holding, blocks)
        self._note(Deed(call="claim", arguments=(_copy(holding), [*blocks])))

    def keep(self, holding: Holding, indices: Sequence[int]) -> None:
        self._own.keep(holding, indices)
        self._note(Deed(call="keep", arguments=(_copy(holding), [*indices])))

    def vacate(self, holding: Holding, first: int = 0) -> None:
        self._own.vacate(holding, first)
        self._note(Deed(call="vacate", arguments=(_copy(holding), first)))

    def discard(self, blocks: Sequence[int]) -> None:
        self._own.discard(blocks)
        self._note(Deed(call="discard", arguments=([*blocks],)))

    def places(self, holding: Holding, begin: int, end: int) -> Sequence[int]:
        return self._own.places(holding, begin, end)

    def plan(self, readings: Sequence[Reading], places: Tensor) -> AttentionPlan:
        return self._own.plan(readings, places)

    def groups(self, readings: Sequence[Reading]) -> list[Group]:
        return self._own.groups(readings)

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        self._own.write(layer, places, key, value)

    def read(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        return self._own.read(layer, group)


def carry_out(deed: Deed, storage: Storage) -> None:
    """Have another storage do the same."""
    getattr(storage, deed.call)(*deed.arguments)


def _copy(holding: Holding) -> Holding:
    """As it is now; whose prefix it begins with is the ledger's affair."""
    return Holding(holding.place, blocks=[*holding.blocks])
