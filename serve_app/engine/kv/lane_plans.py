"""Attention plans for lanes on a CPU: our own kernel for short spans, torch for long prompts and shared prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from serve_app.engine.decoder.attention import GroupedPlan, attend
from serve_app.engine.kv.storage import CALL_POSITIONS, AttentionPlan, Group, Reading, Scoring, Storage
from serve_app.kernels.forms import Row
from serve_app.kernels.interface import attention_of_rows
from serve_app.kernels.torch_private import flash_attention

if TYPE_CHECKING:
    from serve_app.kernels.cpu.rows import RowsKernel, Table

SHORT = 8
"""Queries of one sequence in a step that are the kernel's whatever they see: a token and the guesses behind it."""
LEAST_GAIN = 4 * CALL_POSITIONS
"""Positions that must not be read again for one more product and one merge to pay (measured on CPUs, two rows and more
at 14 heads over 2 and at 4 over 4)."""


class Lanes(Storage, Protocol):
    """A storage where the positions of a sequence lie one behind the other, in whole blocks, and are read uncopied."""

    block_size: int

    def all_positions(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values of all lanes, each [positions, heads, dim]."""
        ...

    def first_position(self, place: int) -> int:
        """Return the position, among those of all lanes, at which a place's lane begins."""
        ...

    def read_place(self, layer: int, place: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """Return one layer's first keys and values of a place, each [keys, heads, dim]."""
        ...


class RowsPlan:
    """A plan for lanes. What the kernel does not know, a cap, sinks, some sizes of heads, is torch's."""

    def __init__(
        self, storage: Lanes, readings: Sequence[Reading], places: Tensor, *, by_torch: Callable[[], AttentionPlan]
    ) -> None:
        """by_torch: makes a plan of all that needs no kernel"""
        self._storage = storage
        self._places = places
        self._by_torch = by_torch
        self._readings = readings
        self._ours = [each for each in readings if each.length <= SHORT]
        self._others: Sequence[Group] | None = None
        self._tables: dict[tuple[int | None, int | None], list[Table]] = {}
        self._is_decoding = all(each.length == 1 for each in readings)
        self._other: AttentionPlan | None = None

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        keys, values = self._storage.all_positions(layer)
        kernel = kernel_of(query, keys, values, scoring)
        if kernel is None or not self._ours:
            return self._plan_by_torch().run(layer, query, key, value, scoring=scoring)
        new = None if key is None or value is None else (key, value)
        if new is not None and not self._is_decoding:
            self._storage.write(layer, self._places, *new)
            new = None
        output = query.new_empty(query.shape)
        for table in self._tables_for(kernel, scoring):
            kernel.run(query, keys, values, table, output, scale=scoring.scale, new=new)
        for group in self._groups():
            keys, values = self._storage.read(layer, group)
            mask = group.mask(scoring.window, query.dtype, query.device, chunk=scoring.chunk)
            group.put(output, attend(group.queries(query), keys, values, mask=mask, scale=scoring.scale))
        return output

    def _groups(self) -> Sequence[Group]:
        """What is torch's."""
        if self._others is None:
            self._others = self._storage.groups([each for each in self._readings if each.length > SHORT])
        return self._others

    def _tables_for(self, kernel: RowsKernel, scoring: Scoring) -> list[Table]:
        name = scoring.window, scoring.chunk
        if name not in self._tables:
            stretch = kernel.stretch
            rows = rows_of(self._storage, self._ours, window=scoring.window, chunk=scoring.chunk, stretch=stretch)
            self._tables[name] = kernel.tables(rows)
        return self._tables[name]

    def _plan_by_torch(self) -> AttentionPlan:
        if self._other is None:
            self._other = self._by_torch()
        return self._other


def kernel_of(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> RowsKernel | None:
    """The kernel for such a layer, if there is one."""
    if scoring.softcap is not None or scoring.sinks is not None or keys.shape != values.shape:
        return None
    if query.dtype != keys.dtype:
        return None
    heads, kv_heads = query.shape[1], keys.shape[1]
    return attention_of_rows(heads // kv_heads, query.shape[2], query.dtype) if heads % kv_heads == 0 else None


def rows_of(
    storage: Lanes, readings: Sequence[Reading], *, window: int | None, chunk: int | None, stretch: int
) -> list[Row]:
    """Return each query with the keys that it sees; stretch: keys that may be read elsewhere together."""
    rows = []
    for reading, common in zip(readings, _in_common(storage, readings, stretch), strict=True):
        lane = storage.first_position(reading.place)
        for number in range(reading.length):
            position, token = reading.start + number, reading.first_token + number
            in_window = 0 if window is None else position + 1 - window
            begin = max(0, in_window, 0 if chunk is None else position - position % chunk)
            elsewhere = () if begin else common
            rows.append(Row(token=token, position=lane + begin, num_keys=position + 1 - begin, elsewhere=elsewhere))
    return rows


def _in_common(storage: Lanes, readings: Sequence[Reading], stretch: int) -> list[Sequence[int]]:
    """Return of each from where its first stretches are read.

    Of copies of a prefix one is read, which stays in the CPU's cache. Names say what is the same: a block's covers all
    that is before it.
    """
    num_blocks = stretch // storage.block_size
    if len(readings) < 2 or stretch % storage.block_size:
        return [()] * len(readings)
    lanes: dict[bytes, int] = {}
    found: list[Sequence[int]] = []
    for reading in readings:
        own, computed = storage.first_position(reading.place), reading.names[: reading.start // storage.block_size]
        last = computed[num_blocks - 1 :: num_blocks]
        found.append([lanes.setdefault(name, own) + at * stretch for at, name in enumerate(last)])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """Rows whose first `num_keys` positions are the same: computed of the same tokens, with the same adapters."""

    readings: tuple[Reading, ...]
    num_keys: int

    @property
    def gain(self) -> int:
        """Positions that are read for one row instead of each."""
        return (len(self.readings) - 1) * self.num_keys


def find_trunks(readings: Iterable[Reading], block_size: int) -> list[Trunk]:
    """Those that pay, none with a row of another. Names say it: a block's covers all that is before it."""
    alike = _alike([each for each in readings if each.length == 1 and len(each.names) * block_size <= each.start], 0)
    found = [trunk for some in alike for trunk in _best(some, block_size)]
    return [trunk for trunk in found if trunk.gain >= LEAST_GAIN]


def _best(readings: Sequence[Reading], block_size: int) -> list[Trunk]:
    """Return one shared prefix of all readings, or several longer ones of some: whichever saves more reading.

    All readings have their first block in common.
    """
    num_common = _num_common(readings)
    whole = Trunk(readings=tuple(readings), num_keys=num_common * block_size)
    parts = [trunk for some in _alike(readings, num_common) for trunk in _best(some, block_size)]
    return parts if sum(part.gain for part in parts) > whole.gain else [whole]


def _alike(readings: Sequence[Reading], at: int) -> list[list[Reading]]:
    """Those with the same name at a place, two and more at a time."""
    by_name: dict[bytes, list[Reading]] = {}
    for each in readings:
        if len(each.names) > at:
            by_name.setdefault(each.names[at], []).append(each)
    return [some for some in by_name.values() if len(some) > 1]


def _num_common(readings: Sequence[Reading]) -> int:
    """How many first blocks are common to all, one at least."""
    first, *others = (each.names for each in readings)
    low, high = 1, min(len(each.names) for each in readings)
    while low < high:
        middle = (low + high + 1) // 2
        if all(names[middle - 1] == first[middle - 1] for names in others):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class _Shared:
    """A shared prefix and its rows.

    place: whose lane it is read from;  tokens: of the rows' queries, [rows] int64;  own: what each row reads of its own
    """

    place: int
    num_keys: int
    tokens: Tensor
    own: tuple[Group, ...]


class TrunkPlan:
    """A plan in which rows attend together to the prefix that they share.

    The kernel that tells sums of exponentials knows no cap, no sinks and one size of head; and where a window hides a
    part of somebody's keys the layer is computed as if nobody shared anything.
    """

    def __init__(self, storage: Lanes, readings: Sequence[Reading], trunks: Sequence[Trunk], places: Tensor) -> None:
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
    attended, total = flash_attention(
        folded, key[None].transpose(1, 2), value[None].transpose(1, 2), mask=None, scale=scale
    )
    unfolded = attended.reshape(kv_heads, rows, -1, dim).transpose(0, 1)
    totals = total.reshape(kv_heads, rows, -1, 1).transpose(0, 1)
    return unfolded.reshape(rows, heads, dim), totals.reshape(rows, heads, 1)


def attend_each(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """As `attend` for one query per row, and ln of the sums of exponentials, [rows, 1, heads, 1] float32."""
    rows, _, heads, dim = query.shape
    folded = query.reshape(rows, key.shape[2], -1, dim)
    attended, total = flash_attention(folded, key.transpose(1, 2), value.transpose(1, 2), mask=mask, scale=scale)
    return attended.reshape(rows, 1, heads, dim), total.reshape(rows, 1, heads, 1)


def _shared(storage: Storage, trunk: Trunk) -> _Shared:
    own = [replace(each, start=each.start - trunk.num_keys) for each in trunk.readings]
    groups = tuple(replace(group, first_key=trunk.num_keys) for group in storage.groups(own))
    tokens = torch.tensor([each.first_token for each in trunk.readings])
    return _Shared(min(each.place for each in trunk.readings), trunk.num_keys, tokens, groups)
