"""Lanes and the pool beside them: what moves between the two is there once, but for a few blocks at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from serve_app.engine.kv.lanes import MOVED_BYTES, PAGE, LaneStorage, Stretch, stretches_of
from serve_app.engine.kv.storage import Holding, KeyValueShape, LayerShape, Storage
from serve_app.engine.kv.store import KeyValueStore
from tests.engine.harness import exchange_storage

pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
MIB = 1 << 20
SLACK = 8 * MIB
"""What a process takes besides while blocks move."""
UNIFORM = KeyValueShape.uniform(layers=8, heads=2, key_dim=64, value_dim=64)
MIXED = KeyValueShape(
    layers=(LayerShape(heads=3, key_dim=96, value_dim=64), *(LayerShape(heads=2, key_dim=64, value_dim=64),) * 6)
)


def make(shape: KeyValueShape, *, num_blocks: int, moved_bytes: int = MOVED_BYTES) -> KeyValueStore:
    storage = LaneStorage(
        shape, num_lanes=3, max_model_len=num_blocks * BLOCK_SIZE, num_blocks=num_blocks, block_size=BLOCK_SIZE,
        dtype=torch.float32, moved_bytes=moved_bytes,
    )  # fmt: skip
    return KeyValueStore(storage, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_places=3)


def tokens(num_blocks: int, salt: int = 0) -> list[int]:
    return [salt + position for position in range(num_blocks * BLOCK_SIZE)]


def fill(store: KeyValueStore, shape: KeyValueShape, holding: Holding, begin: int, end: int) -> None:
    """Write a number of its own at each position of these, another one in each layer."""
    for first in range(begin, end, 256):
        places = torch.tensor(list(store.storage.places(holding, first, min(first + 256, end))))
        new = torch.arange(first, first + len(places))[:, None, None] + 1.0
        for number, layer in enumerate(shape.layers):
            keys = new.expand(-1, layer.heads, layer.key_dim) + number / 8
            store.storage.write(number, places, keys, -new.expand(-1, layer.heads, layer.value_dim) - number / 8)


def find(store: KeyValueStore, holding: Holding, text: list[int]) -> int:
    """Match and have it filled."""
    known = store.match_prefix(holding, text, salt=b"")
    while store.fill_first():
        pass
    return known


def on_lane(storage: LaneStorage, layer: int, place: int, num_keys: int) -> list[Tensor]:
    """One layer's first keys and values of a place, each [keys, heads, dim]."""
    first = storage.first_position(place)
    return [part[first : first + num_keys] for part in storage.all_positions(layer)]


def assert_filled(store: KeyValueStore, shape: KeyValueShape, holding: Holding, num_tokens: int) -> None:
    assert isinstance(store.storage, LaneStorage)
    for number in range(len(shape.layers)):
        for part, sign in zip(on_lane(store.storage, number, holding.place, num_tokens), (1, -1), strict=True):
            for first in range(0, num_tokens, 256):  # not all at once: that takes memory, too
                found = part[first : first + 256]
                expected = torch.arange(first, first + len(found))[:, None, None] + 1.0 + number / 8
                assert torch.equal(found, sign * expected.expand_as(found))


def peak_beyond_now(work: Callable[[], None]) -> int:
    """How much more memory than at the beginning the process had at most."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pytest.skip("the kernel does not say what a process had at most")
    before = _most_bytes()
    work()
    return _most_bytes() - before


def _most_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.law("Budget")
@pytest.mark.parametrize("shape", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_the_budget_bounds_what_is_really_held_whatever_moves(shape: KeyValueShape) -> None:
    num_blocks = 64 * MIB // (shape.bytes_per_token(torch.float32) * BLOCK_SIZE)
    budget = num_blocks * shape.bytes_per_token(torch.float32) * BLOCK_SIZE
    store = make(shape, num_blocks=num_blocks)
    whole, half = tokens(num_blocks), tokens(num_blocks // 2)

    def use() -> None:
        first = store.open()
        assert store.reserve(first, len(whole))
        fill(store, shape, first, 0, len(whole))
        store.publish(first, whole, salt=b"")
        for _ in range(2):  # as one that is preempted and comes back
            store.close(first)
            first = store.open()
            assert find(store, first, [*whole, 0]) == len(whole)
        assert_filled(store, shape, first, len(whole))
        store.close(first)
        parent, child = store.open(), store.open()
        assert find(store, parent, [*half, 0]) == len(half)
        store.fork(parent, child, len(half))
        store.fill(len(half))
        assert_filled(store, shape, child, len(half))
        store.close(parent)
        store.close(child)

    assert peak_beyond_now(use) <= budget + MOVED_BYTES + SLACK


@pytest.mark.parametrize("shape", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_contents_are_the_same_in_however_many_pieces_they_move(shape: KeyValueShape) -> None:
    store = make(shape, num_blocks=40, moved_bytes=1)
    first = store.open()
    text = tokens(17)
    assert store.reserve(first, len(text) + 5)
    fill(store, shape, first, 0, len(text) + 5)
    store.publish(first, text, salt=b"")
    for _ in range(3):
        store.close(first)
        first = store.open()
        assert find(store, first, [*text, 0]) == len(text)
        assert_filled(store, shape, first, len(text))
    store.check_integrity({first.place: len(text)})


def test_blocks_that_others_have_named_are_kept_once_and_the_rest_of_a_lane_is_wiped() -> None:
    store = make(UNIFORM, num_blocks=40, moved_bytes=1)
    common = tokens(3)
    holdings = [store.open(), store.open()]
    for holding, text in zip(holdings, ([*common], [*common, *tokens(6, salt=9000)]), strict=True):
        assert store.reserve(holding, len(text) + 5)
        fill(store, UNIFORM, holding, 0, len(text) + 5)
        store.publish(holding, text, salt=b"")
    for holding in holdings:
        store.close(holding)
    assert store.num_cached_blocks == 9
    fresh = store.open()
    assert store.reserve(fresh, BLOCK_SIZE)
    assert isinstance(store.storage, LaneStorage)
    assert all(not part.any() for part in on_lane(store.storage, 7, fresh.place, 10 * BLOCK_SIZE))
    again = store.open()
    assert find(store, again, [*common, *tokens(6, salt=9000), 0]) == 9 * BLOCK_SIZE
    assert_filled(store, UNIFORM, again, 9 * BLOCK_SIZE)


class HalfKeeping:
    """A storage that keeps the first of what it shall keep, and fails then."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    def keep(self, holding: Holding, indices: Sequence[int]) -> None:
        self._storage.keep(holding, indices[:1])
        raise MemoryError("no more")


def test_what_could_not_be_kept_whole_is_found_by_nobody_and_its_place_is_clean() -> None:
    store = make(UNIFORM, num_blocks=8)
    text = tokens(3)
    first = store.open()
    assert store.reserve(first, len(text))
    fill(store, UNIFORM, first, 0, len(text))
    store.publish(first, text, salt=b"")
    whole = store.storage
    exchange_storage(store, HalfKeeping(whole))
    with pytest.raises(MemoryError):
        store.close(first)
    exchange_storage(store, whole)
    store.check_integrity({})
    again = store.open()
    assert find(store, again, [*text, 0]) == 0
    assert store.reserve(again, len(text))
    assert isinstance(store.storage, LaneStorage)
    assert all(not part.any() for part in on_lane(store.storage, 0, again.place, len(text)))


def test_lanes_share_no_page() -> None:
    store = make(MIXED, num_blocks=5)
    assert isinstance(store.storage, LaneStorage)
    for number in range(len(MIXED.layers)):
        for part in store.storage.all_positions(number):
            assert part.data_ptr() % PAGE == 0
            lane_bytes = store.storage.first_position(1) * part.stride(0) * part.itemsize
            assert lane_bytes % PAGE == 0


def test_neighbours_on_lane_and_in_the_pool_move_together() -> None:
    assert stretches_of([0, 1, 2, 5, 6], [7, 8, 3, 4, 5]) == [Stretch(0, 7, 2), Stretch(2, 3, 1), Stretch(5, 4, 2)]
    assert stretches_of([], []) == []
