"""The key/value store over both storages: hits give what was computed, what is let go is wiped, memory is bounded."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from serve_app.engine.kv.lanes import MOVED_BYTES, PAGE, LaneStorage, Reservation
from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.kv.storage import Holding, KeyValueShape, Reading, Storage
from serve_app.engine.kv.store import KeyValueStore

pytestmark = pytest.mark.slow

SHAPE = KeyValueShape.uniform(layers=2, heads=1, key_dim=2, value_dim=3)
BLOCK_SIZE = 4

MakeStore = Callable[..., KeyValueStore]


def lanes(
    num_blocks: int, num_places: int, *, shape: KeyValueShape = SHAPE, moved_bytes: int = MOVED_BYTES
) -> LaneStorage:
    return LaneStorage(
        shape,
        num_lanes=num_places,
        max_model_len=32,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        moved_bytes=moved_bytes,
    )


def pages(num_blocks: int, num_places: int) -> Storage:
    return PageStorage(
        SHAPE, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu")
    )


@pytest.fixture(params=[lanes, pages])
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    def make(*, num_blocks: int = 6, num_places: int = 3) -> KeyValueStore:
        storage = request.param(num_blocks, num_places)
        return KeyValueStore(storage, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_places=num_places)

    return make


def marks(tokens: list[int]) -> torch.Tensor:
    """A number that names each token and its position."""
    return torch.tensor([float(token * 100 + position) for position, token in enumerate(tokens)])


def fill(
    store: KeyValueStore, holding: Holding, tokens: list[int], begin: int = 0, *, shape: KeyValueShape = SHAPE
) -> None:
    """Write the marks of tokens from `begin` on."""
    places = torch.tensor(list(store.storage.places(holding, begin, len(tokens))))
    new = marks(tokens)[begin:, None, None]
    for layer, each in enumerate(shape.layers):
        keys, values = new.expand(-1, each.heads, each.key_dim), new.expand(-1, each.heads, each.value_dim)
        store.storage.write(layer, places, keys + layer, -values - layer)


def contents(store: KeyValueStore, holding: Holding, num_tokens: int, layer: int = 0) -> list[float]:
    """The marks that attention would read."""
    reading = Reading(first_token=0, place=holding.place, blocks=holding.blocks, start=num_tokens - 1, length=1)
    (group,) = store.storage.groups([reading])
    keys, values = store.storage.read(layer, group)
    assert torch.equal(keys[0, :, 0, 0], -values[0, :, 0, 0])
    found: list[float] = (keys[0, :, 0, 0] - layer).tolist()
    return found


def find(store: KeyValueStore, holding: Holding, tokens: list[int], *, salt: bytes = b"") -> int:
    """Match and have it filled."""
    known = store.match_prefix(holding, tokens, salt=salt)
    while store.fill_first():
        pass
    return known


def hold(store: KeyValueStore, tokens: list[int], *, salt: bytes = b"") -> Holding:
    """What a sequence does: match, reserve, compute."""
    holding = store.open()
    known = find(store, holding, tokens, salt=salt)
    assert store.reserve(holding, len(tokens))
    fill(store, holding, tokens, known)
    return holding


@pytest.mark.law("Budget")
def test_reserving_beyond_the_budget_is_refused_and_changes_nothing(make_store: MakeStore) -> None:
    store = make_store(num_blocks=3)
    first, second = store.open(), store.open()
    assert store.reserve(first, 8)
    assert not store.reserve(second, 5)
    assert store.num_free_blocks == 1
    assert store.reserve(second, 4)
    assert store.num_free_blocks == 0


def test_the_lowest_free_place_is_taken_and_nobody_moves(make_store: MakeStore) -> None:
    store = make_store()
    holdings = [hold(store, [number] * 5) for number in range(1, 4)]
    assert [each.place for each in holdings] == [0, 1, 2]
    store.close(holdings[0])
    assert (holdings[1].place, holdings[2].place) == (1, 2)
    assert contents(store, holdings[2], 5) == marks([3] * 5).tolist()
    assert store.open().place == 0


def test_a_published_prefix_is_found_under_its_salt_only(make_store: MakeStore) -> None:
    store = make_store(num_blocks=12)
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    holding = hold(store, tokens)
    store.publish(holding, tokens, salt=b"a")
    other = store.open()
    assert find(store, other, tokens, salt=b"b") == 0
    assert find(store, other, [5, 6, 7, 8, 1, 2, 3, 4, 5], salt=b"a") == 4
    assert contents(store, other, 4) == marks(tokens[:4]).tolist()
    assert contents(store, other, 4, layer=1) == marks(tokens[:4]).tolist()


@pytest.mark.parametrize("is_running", [True, False])
def test_a_hit_gives_what_was_computed_whether_its_owner_runs_or_not(make_store: MakeStore, is_running: bool) -> None:
    store = make_store(num_blocks=12)
    tokens = list(range(1, 10))
    owner = hold(store, tokens)
    store.publish(owner, tokens, salt=b"")
    if not is_running:
        store.close(owner)
    other = store.open()
    assert find(store, other, tokens, salt=b"") == 8
    assert contents(store, other, 8) == marks(tokens[:8]).tolist()
    store.check_integrity({0: 8, 1: 8} if is_running else {0: 8})


def test_the_last_token_is_never_matched(make_store: MakeStore) -> None:
    store = make_store()
    holding = hold(store, [1, 2, 3, 4])
    store.publish(holding, [1, 2, 3, 4], salt=b"")
    other = store.open()
    assert find(store, other, [1, 2, 3, 4], salt=b"") == 0
    assert find(store, other, [1, 2, 3, 4, 5], salt=b"") == 4


def test_a_hit_on_what_nobody_holds_is_not_paid_twice(make_store: MakeStore) -> None:
    store = make_store(num_blocks=4)
    tokens = list(range(1, 14))
    holding = hold(store, tokens)
    store.publish(holding, tokens, salt=b"")
    store.close(holding)
    assert (store.num_cached_blocks, store.num_free_blocks) == (3, 1)
    again = hold(store, tokens)
    assert (store.num_cached_blocks, store.num_free_blocks) == (0, 0)
    assert contents(store, again, 13) == marks(tokens).tolist()


def test_writing_after_a_hit_leaves_the_cached_beginning_as_it_was(make_store: MakeStore) -> None:
    store = make_store(num_blocks=12)
    tokens = list(range(1, 10))
    owner = hold(store, tokens)
    store.publish(owner, tokens, salt=b"")
    store.close(owner)
    hold(store, [*tokens[:8], 70, 71, 72])
    third = store.open()
    assert find(store, third, tokens, salt=b"") == 8
    assert contents(store, third, 8) == marks(tokens[:8]).tolist()


@pytest.mark.parametrize("num_tokens", [8, 9, 11])
def test_a_fork_has_its_parents_positions_and_goes_its_own_way(make_store: MakeStore, num_tokens: int) -> None:
    store = make_store(num_blocks=12)
    tokens = list(range(1, 13))
    parent, child = hold(store, tokens), store.open()
    store.fork(parent, child, num_tokens)
    store.fill(num_tokens)
    assert not child.pending
    assert contents(store, child, num_tokens) == marks(tokens[:num_tokens]).tolist()
    own = [*tokens[:num_tokens], 90]
    assert store.reserve(child, len(own))
    fill(store, child, own, num_tokens)
    assert contents(store, parent, 12) == marks(tokens).tolist()
    assert contents(store, child, len(own)) == marks(own).tolist()
    store.close(parent)
    assert contents(store, child, len(own)) == marks(own).tolist()
    store.check_integrity({child.place: len(own)})


def test_what_a_sequence_leaves_behind_reaches_nobody(make_store: MakeStore) -> None:
    store = make_store(num_blocks=3, num_places=1)
    poisoned = hold(store, [1] * 12)
    for layer in range(2):
        everywhere = torch.tensor(list(store.storage.places(poisoned, 0, 12)))
        store.storage.write(layer, everywhere, torch.full((12, 1, 2), torch.nan), torch.full((12, 1, 3), torch.nan))
    store.close(poisoned)
    fresh = store.open()
    assert store.reserve(fresh, 12)
    (group,) = store.storage.groups(
        [Reading(first_token=0, place=fresh.place, blocks=fresh.blocks, start=11, length=1)]
    )
    for layer in range(2):
        keys, values = store.storage.read(layer, group)
        assert torch.count_nonzero(keys) == torch.count_nonzero(values) == 0


@pytest.mark.law("Conservation")
def test_random_use_keeps_contents_and_conserves_blocks(make_store: MakeStore) -> None:
    generator = random.Random(11)
    store = make_store(num_blocks=12, num_places=4)
    running: dict[int, tuple[Holding, list[int]]] = {}
    for _ in range(1500):
        action = generator.random()
        if action < 0.35 and store.has_common_place:
            tokens = [generator.randrange(1, 3) for _ in range(generator.randrange(1, 12))]
            holding = store.open()
            known = find(store, holding, tokens, salt=b"")
            if store.reserve(holding, len(tokens)):
                fill(store, holding, tokens, known)
                running[holding.place] = (holding, tokens)
            else:
                store.close(holding)
        elif action < 0.6 and running:
            holding, tokens = generator.choice(list(running.values()))
            new = [*tokens, *(generator.randrange(1, 3) for _ in range(generator.randrange(1, 4)))][:32]
            if store.reserve(holding, len(new)):
                fill(store, holding, new, len(tokens))
                tokens[:] = new
        elif action < 0.75 and running:
            holding, tokens = generator.choice(list(running.values()))
            store.publish(holding, tokens, salt=b"")
        elif running:
            holding, _ = running.pop(generator.choice(list(running)))
            store.close(holding)
        store.check_integrity({place: len(tokens) for place, (_, tokens) in running.items()})
        for holding, tokens in running.values():
            assert contents(store, holding, len(tokens)) == marks(tokens).tolist()


def test_neighbouring_lanes_are_read_in_one_call_whatever_lies_between() -> None:
    store = KeyValueStore(lanes(12, 4), num_blocks=12, block_size=BLOCK_SIZE, num_places=4)
    holdings = [hold(store, [number] * 5) for number in range(1, 5)]
    store.close(holdings[1])
    readings = [
        Reading(first_token=number, place=each.place, blocks=each.blocks, start=4, length=1)
        for number, each in enumerate([holdings[0], holdings[2], holdings[3]])
    ]
    (group,) = store.storage.groups(readings)
    packed = torch.arange(3.0)[:, None, None]
    queries = group.queries(packed)
    assert queries[:, 0, 0, 0].tolist() == [0.0, 0.0, 1.0, 2.0]
    output = torch.zeros_like(packed)
    group.put(output, queries)
    assert torch.equal(output, packed)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


@pytest.mark.law("Budget")
def test_reserved_memory_is_committed_as_it_is_written_and_given_back() -> None:
    shape = KeyValueShape.uniform(layers=4, heads=2, key_dim=64, value_dim=64)
    num_blocks, budget = 1024, 1024 * 16 * 4 * 2 * 128 * 4
    storage = LaneStorage(
        shape, num_lanes=64, max_model_len=131072, num_blocks=num_blocks, block_size=16, dtype=torch.float32
    )  # lanes for 32 GiB
    store = KeyValueStore(storage, num_blocks=num_blocks, block_size=16, num_places=64)
    before = resident_bytes()
    for turn in range(6):
        holding = store.open()
        tokens = [turn + 1] * (16 * 800)
        assert store.reserve(holding, len(tokens))
        new = torch.ones(16, 2, 64)
        for begin in range(0, len(tokens), 16):
            places = torch.tensor(list(storage.places(holding, begin, begin + 16)))
            for layer in range(4):
                storage.write(layer, places, new, new)
        store.publish(holding, tokens, salt=b"")
        assert resident_bytes() - before < 1.1 * budget + (24 << 20)
        store.close(holding)
        assert resident_bytes() - before < 1.1 * budget + (24 << 20)
    store.clear()
    assert resident_bytes() - before < 0.3 * budget


def test_given_back_memory_reads_as_zeros_to_the_byte() -> None:
    memory = Reservation(4 * PAGE)
    tensor = memory.tensor((4 * PAGE,), torch.uint8)
    tensor.fill_(7)
    memory.give_back(100, 3 * PAGE + 5)
    assert tensor[:100].eq(7).all()
    assert tensor[100 : 3 * PAGE + 5].eq(0).all()
    assert tensor[3 * PAGE + 5 :].eq(7).all()
