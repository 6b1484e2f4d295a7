"""Applies all resident adapters at once: each row of a step is changed by the adapter in its own slot.

An adapter lies on the shelf of its rank (8, 16, 32, …), where the factors of all places are stacked. Kernels take the
adapted rows of a step in tiles of one adapter; so it costs what the slots present cost, and no number of one adapter
ever meets a row of another. A mix such as a*0.7+b*0.3 takes no slot of its own: its rows are in a tile of each adapter,
and each change has a factor before it is added. Of experts and routers the adapted rows are computed apart, mix by mix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from serve_app.engine.decoder.linears import unwrapped
from serve_app.engine.lora.adapter import Adapter, LowRank, frame_of, read_weights
from serve_app.engine.lora.buckets import MIN_RANK, Shelf, Stack, entries_per_rank, shelf_rank
from serve_app.engine.lora.matching import Target, head_name
from serve_app.engine.lora.modules import BankedExperts, BankedLinear, BankedModule, BankedRouter, Step
from serve_app.engine.lora.plan import Mix, Plan, Resident, ShelfRows, find_gains, lay_rows, lay_tiles
from serve_app.engine.tensor_parallel.division import Division, part_of
from serve_app.kernels.forms import AdapterKernels, AdapterTiles, PlainKernels
from serve_app.kernels.interface import adapter_kernels

SwapIn = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the stacks of some shelves were, which are there as long as this."""

    stacks: tuple[Stack, ...]
    _shelves: tuple[tuple[Shelf, int], ...]

    @property
    def is_so(self) -> bool:
        """Whether they are there still."""
        return all(shelf.num_changes == count for shelf, count in self._shelves)


class AdapterBank:
    """The adapters of one model: known versions, of which facts are kept, some of them resident in slots.

    Two threads meet here. `stage` reads and copies, in any thread, one call at a time; everything else belongs to
    the engine's thread, which never waits for it.
    """

    def __init__(
        self,
        model: nn.Module,
        adapters: Iterable[Adapter],
        *,
        max_slots: int,
        max_bytes: int | None = None,
        uses_triton: bool = False,
        division: Division | None = None,
    ) -> None:
        """max_bytes: of all resident adapters together; None does not bound them

        uses_triton: whether kernels are Triton's;  division: of which the model is a part, while adapters are whole
        """
        self.num_slots, self.max_bytes = max_slots, max_bytes
        self._model, self._uses_triton, self._division = model, uses_triton, division
        self._head_name = head_name(model)
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._adapters: dict[str, Adapter] = {}
        self._sizes: dict[str, int] = {}
        self._frames: dict[str, Tensor] = {}  # of each target, as `_frame` gives it
        self._bases: dict[str, nn.Module] = {}
        self._shelves: dict[int, Shelf] = {}
        self._step = Step()
        self.wrapped: dict[str, BankedLinear] = {}
        self._modules: dict[str, BankedModule] = {}
        self._residents: dict[int, Resident] = self._step.residents
        self._last_mixes: tuple[Mix, ...] | None = None
        self._last_plan: Plan | None = None
        self._last_tiles: tuple[AdapterTiles, ...] = ()
        self._staging = threading.Lock()
        self._places: dict[int, tuple[int, int]] = {}  # slot -> rank and place, as `stage` left them
        self._vacated: set[int] = set()
        self._offered: dict[str, dict[str, LowRank]] = {}
        self.add(adapters)

    def add(self, adapters: Iterable[Adapter]) -> bool:
        """Make more versions known, of whatever ranks and modules; return whether modules were wrapped for them.

        Who keeps modules of the model looks them up anew then.
        """
        added = {adapter.version: adapter for adapter in adapters}
        self._adapters.update(added)
        targets = {change.target.name: change.target for each in added.values() for change in each.changes.values()}
        new = [targets[name] for name in sorted(targets.keys() - self._frames.keys())]
        for target in new:
            self._wrap(target)
        ranks = {shelf_rank(adapter.rank) for adapter in added.values()} - self._shelves.keys()
        for rank in sorted(ranks):
            self._shelves[rank] = Shelf(rank, self._frames, most=self.num_slots)
        if new or ranks:
            self._choose_kernels()
        self._sizes |= {version: self.bytes_in_slot(adapter) for version, adapter in added.items()}
        return bool(new)

    def admit(self, adapter: Adapter) -> bool:
        """As `add`, of one adapter while steps are computed; in all shards of a divided model."""
        return self.add([adapter])

    def own_part(self, weights: dict[str, LowRank]) -> dict[str, LowRank]:
        """Return what this shard computes of an adapter that was read whole."""
        return weights if self._division is None else part_of(weights, self._division)

    def drop(self, version: str) -> None:
        """Forget a version that is in no slot. What was wrapped for it stays."""
        self._adapters.pop(version, None)
        self._sizes.pop(version, None)
        self._offered.pop(version, None)

    def offer(self, version: str, weights: dict[str, LowRank]) -> None:
        """Have the next `stage` of this version take weights that were just read, instead of its file."""
        self._offered[version] = weights

    def knows(self, version: str) -> bool:
        """Return whether a version can be staged."""
        return version in self._adapters

    def bytes_of(self, version: str) -> int:
        """Return the bytes of a version in its slot; 0 if it is unknown, as nothing of it will get there."""
        return self._sizes.get(version, 0)

    def bytes_in_slot(self, adapter: Adapter) -> int:
        """Return the bytes that an adapter takes in a slot, in this shard."""
        entries = (entries_per_rank(self._frame_of(each.target)) for each in adapter.changes.values())
        return shelf_rank(adapter.rank) * sum(entries) * self._dtype.itemsize

    def fits(self, versions: Iterable[str]) -> bool:
        """Return whether these known versions may be resident together."""
        return self.max_bytes is None or sum(map(self.bytes_of, versions)) <= self.max_bytes

    @property
    def num_bytes(self) -> int:
        """What the shelves take, in the memory of the model's device; may be read by any thread.

        Free places and what only a neighbour on the shelf changes count, too. So it may exceed `max_bytes` after
        adapters of other ranks or modules have left, until their shelf is empty.
        """
        return sum(shelf.num_bytes for shelf in tuple(self._shelves.values()))

    @property
    def watched(self) -> list[nn.Module]:
        """The adapted modules whose output is one tensor."""
        return [*self.wrapped.values(), *(each for each in self._modules.values() if isinstance(each, BankedExperts))]

    def load(self, slot: int, version: str) -> None:
        """Move a known version into a slot at once, in place of what was there. Raises AdapterRefused."""
        self.vacate(slot)
        self.stage(slot, version)()

    def vacate(self, slot: int) -> None:
        """Nobody may compute with this slot until something has been swapped in."""
        self._residents.pop(slot, None)
        self._vacated.add(slot)
        self._last_mixes = None

    @torch.no_grad()
    def stage(self, slot: int, version: str) -> SwapIn:
        """Read a known version and copy it to a place for this slot, which has been vacated.

        May run beside steps, in another thread. The engine's thread calls what is returned, which swaps references
        only. Raises AdapterRefused, and leaves the slot empty then.
        """
        adapter = self._adapters[version]
        rank = shelf_rank(adapter.rank)
        with self._staging:
            for each in (slot, *tuple(self._vacated)):
                self._free(each)
            try:
                weights = self.own_part(self._read(adapter))
                shelf = self._shelves[rank]
                room = None if self.max_bytes is None else self.max_bytes - self.num_bytes + shelf.num_bytes
                place = shelf.put(weights, room)
                self._places[slot] = (rank, place)
                has_gain = self._put_gains(slot, weights)
            finally:
                for shelf in tuple(self._shelves.values()):
                    shelf.trim()
        resident = Resident(version=version, rank=rank, place=place, has_gain=has_gain)

        def swap_in() -> None:
            self._residents[slot] = resident
            self._last_mixes = None

        return swap_in

    def begin_step(self, row_mixes: Sequence[Mix]) -> None:
        """Say which slots each packed token uses, and how much of each. A step without adapters costs nothing."""
        mixes = tuple(row_mixes)
        if mixes != self._last_mixes:
            self._last_plan, self._last_tiles = self._plan(mixes)
            self._step.groups = self._groups(mixes)
            self._last_mixes = mixes
        self._step.plan, self._step.tiles = self._last_plan, self._last_tiles

    @contextmanager
    def at_head(self, mixes: Sequence[Mix]) -> Iterator[None]:
        """Within it the output head is given the rows of these mixes alone."""
        head = self.wrapped.get(self._head_name)
        if head is None or not any(mixes):
            yield
            return
        hook = head.register_forward_pre_hook(lambda *_: self.begin_step(mixes))
        try:
            yield
        finally:
            hook.remove()

    def end_step(self) -> None:
        self._step.plan, self._step.tiles = None, ()

    def rows_of(self, mixes: Sequence[Mix]) -> tuple[ShelfRows, ...] | None:
        """A step's adapted rows as kernels read them; None where more than kernels computes them, as DoRA's gains."""
        has_gain = any(self._residents[slot].has_gain for mix in mixes for slot, _ in mix)
        if has_gain or not self._has_kernels:
            return None
        return lay_rows(mixes, self._residents, tile_rows=self._step.kernels.tile_rows)

    @property
    def kernel_ranks(self) -> tuple[int, ...]:
        """The ranks of all shelves; () where kernels do not compute them."""
        return tuple(sorted(self._shelves)) if self._has_kernels else ()

    @property
    def _has_kernels(self) -> bool:
        return not isinstance(self._step.kernels, PlainKernels)

    @torch.inference_mode(False)  # as the places are written later, outside of it
    def reserve(self) -> None:
        """Have the shelves of known adapters take, within `max_bytes`, all places that they may ever need.

        So their stacks stay where they are. Shelves of ranks that come later grow.
        """
        with self._staging:
            for rank in self.kernel_ranks:
                room = None if self.max_bytes is None else self.max_bytes // len(self._shelves)
                known = [each for each in self._adapters.values() if shelf_rank(each.rank) == rank]
                self._shelves[rank].reserve({c.target.name for each in known for c in each.changes.values()}, room)

    @contextmanager
    def running(self, num_tokens: int, tiles: tuple[AdapterTiles, ...]) -> Iterator[None]:
        """Within it all modules have these tiles computed by kernels."""
        self._step.plan, self._step.tiles = Plan(num_tokens=num_tokens), tiles
        try:
            yield
        finally:
            self.end_step()

    @contextmanager
    def standing(self, ranks: Iterable[int]) -> Iterator[Standing | None]:
        """Within it nobody stages: the stacks of these ranks stay where they are; None where somebody does."""
        if not self._staging.acquire(blocking=False):
            yield None
            return
        try:
            shelves = [self._shelves[rank] for rank in ranks]
            stacks = tuple(stack for shelf in shelves for stack in shelf.stacks.values())
            yield Standing(stacks, tuple((shelf, shelf.num_changes) for shelf in shelves))
        finally:
            self._staging.release()

    def unwrap(self) -> None:
        """Give the model its own modules back."""
        for name, module in self._bases.items():
            self._model.set_submodule(name, module)

    def _read(self, adapter: Adapter) -> dict[str, LowRank]:
        """What it does to each module. Raises AdapterRefused."""
        offered = self._offered.pop(adapter.version, None)
        return self.read(adapter) if offered is None else offered

    def read(self, adapter: Adapter) -> dict[str, LowRank]:
        """Read an adapter's file, whole, whether the adapter is known or not. Raises AdapterRefused."""
        return read_weights(adapter, self._model, self._linears_of(adapter), dtype=self._dtype)

    def _linears_of(self, adapter: Adapter) -> dict[str, nn.Module]:
        """The linears with their weights, those included that nothing is wrapped around yet."""
        names = [name for name, change in adapter.changes.items() if change.target.parameter is None]
        return {name: unwrapped(self._model.get_submodule(name)) for name in names}

    def _frame_of(self, target: Target) -> Tensor:
        """Return what has the size of a weight, whether its module is wrapped or not."""
        known = self._frames.get(target.name)
        return _frame(target, self._model.get_submodule(target.module)) if known is None else known

    def _wrap(self, target: Target) -> None:
        """Put around a module what changes the rows of its outputs."""
        self._frames[target.name] = self._frame_of(target)
        base = self._bases.setdefault(target.module, self._model.get_submodule(target.module))
        if target.parameter is None:
            wrapped = BankedLinear(base, target.name, shelves=self._shelves, step=self._step)
            self.wrapped[target.name] = wrapped
            self._model.set_submodule(target.name, wrapped)
        elif target.module not in self._modules:
            self._modules[target.module] = self._banked(target)
            self._model.set_submodule(target.module, self._modules[target.module])

    def _choose_kernels(self) -> None:
        """Kernels compute every adapter that is known, or torch does."""
        if not (self._uses_triton and self._has_kernels):
            self._step.kernels = self._kernels(self._frames[name] for name in self.wrapped) or PlainKernels()
            self._last_mixes = None

    def warm_kernels(self) -> None:
        """Compile kernels beforehand, in any thread, as the first adapter would in the engine's."""
        self._kernels(())

    def _kernels(self, frames: Iterable[Tensor]) -> AdapterKernels | None:
        ranks, device, dtype = self._shelves or (MIN_RANK,), self._device, self._dtype
        return adapter_kernels(frames, ranks, device=device, dtype=dtype, uses_triton=self._uses_triton)

    def _banked(self, target: Target) -> BankedModule:
        """A module that is no linear, as rows with adapters are computed with it."""
        base = self._bases[target.module]
        if target.experts is not None:
            return BankedExperts(base, target.module, shelves=self._shelves, step=self._step)
        assert target.parameter is not None, "linears are banked by themselves"
        return BankedRouter(base, target.module, target.parameter, shelves=self._shelves, step=self._step)

    def _groups(self, mixes: tuple[Mix, ...]) -> list[tuple[Mix, Tensor]]:
        """Adapted rows by their mix, where there is a module that asks for them."""
        rows: dict[Mix, list[int]] = {}
        for row, mix in enumerate(mixes if self._modules else ()):
            if mix:
                rows.setdefault(mix, []).append(row)
        return [(mix, torch.tensor(found, device=self._device)) for mix, found in rows.items()]

    def _plan(self, mixes: tuple[Mix, ...]) -> tuple[Plan | None, tuple[AdapterTiles, ...]]:
        present = {slot for mix in set(mixes) for slot, _ in mix}
        for slot in present:
            assert slot in self._residents, f"slot {slot} holds no adapter that could be computed with"
        if not present:
            return None, ()
        tiles = lay_tiles(mixes, self._residents, tile_rows=self._step.kernels.tile_rows, device=self._device)
        gains = find_gains(mixes, self._residents, device=self._device)
        return Plan(num_tokens=len(mixes), gains=gains), tiles

    def _free(self, slot: int) -> None:
        self._vacated.discard(slot)
        if slot in self._places:
            rank, place = self._places.pop(slot)
            self._shelves[rank].free(place)

    def _put_gains(self, slot: int, weights: dict[str, LowRank]) -> bool:
        has_gain = any(low_rank.gain is not None for low_rank in weights.values())
        for name, wrapped in tuple(self.wrapped.items()):
            gain = weights[name].gain if name in weights else None
            if gain is not None and wrapped.gains is None:
                wrapped.gains = frame_of(wrapped.base).new_ones(self.num_slots, gain.numel())
            if wrapped.gains is not None:
                wrapped.gains[slot] = 1.0 if gain is None else gain.to(self._device)
        return has_gain


def _frame(target: Target, module: nn.Module) -> Tensor:
    """What has the size, type and device of a weight, as [out, in], or as [experts, out, in] of experts."""
    if target.parameter is None:
        return frame_of(module)
    parameter: Tensor = getattr(module, target.parameter)
    return parameter.mT if target.experts is not None and module.is_transposed else parameter
