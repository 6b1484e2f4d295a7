"""The key/value store over pages as CPUs and GPUs have them: hits give what was computed, memory is bounded."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.kv.reservation import PAGE, Reservation
from serve_app.engine.kv.storage import Holding, KeyValueShape, LayerShape
from serve_app.engine.kv.store import KeyValueStore
from serve_app.kernels.interface import Kernels
from tests.engine.harness import uniform

pytestmark = pytest.mark.slow

SHAPE = KeyValueShape(
    layers=(LayerShape(heads=1, key_dim=2, value_dim=3), *(LayerShape(heads=2, key_dim=3, value_dim=3),) * 2)
)
BLOCK_SIZE = 4

SLACK = 16 << 20
"""What a process takes beside, in bytes."""

MakeStore = Callable[..., KeyValueStore]


def pages(num_blocks: int, kernels: Kernels = "torch", *, shape: KeyValueShape = SHAPE) -> PageStorage:
    """Pages of a block together, as on CPUs, or with "triton" pages of a layer together, as on GPUs."""
    return PageStorage(
        shape, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu"),
        kernels=kernels,
    )  # fmt: skip


@pytest.fixture(params=["torch", "triton"])
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    def make(*, num_blocks: int = 6, num_places: int = 3) -> KeyValueStore:
        storage = pages(num_blocks, request.param)
        return KeyValueStore(storage, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_places=num_places)

    return make


def marks(tokens: list[int]) -> torch.Tensor:
    """A number that names each token and its position."""
    return torch.tensor([float(token * 100 + position) for position, token in enumerate(tokens)])


def fill(store: KeyValueStore, holding: Holding, tokens: list[int], begin: int = 0) -> None:
    """Write the marks of tokens from `begin` on."""
    places = torch.tensor(list(store.storage.places(holding, begin, len(tokens))))
    new = marks(tokens)[begin:, None, None]
    for layer, each in enumerate(SHAPE.layers):
        keys, values = new.expand(-1, each.heads, each.key_dim), new.expand(-1, each.heads, each.value_dim)
        store.storage.write(layer, places, keys + layer, -values - layer)


def contents(store: KeyValueStore, holding: Holding, num_tokens: int) -> list[float]:
    """The marks that attention would read, the same in all layers."""
    found = []
    for layer in range(len(SHAPE.layers)):
        keys, values = store.storage.read(layer, torch.tensor([holding.blocks]))
        assert keys.eq(keys[..., :1, :1]).all()
        assert values.eq(-keys[..., :1, :1]).all()
        found.append((keys[0, :num_tokens, 0, 0] - layer).tolist())
    assert found[1:] == found[:-1]
    return list(found[0])


def hold(store: KeyValueStore, tokens: list[int], *, salt: bytes = b"") -> Holding:
    """What a sequence does: match, reserve, compute."""
    holding = store.open()
    known = store.match_prefix(holding, tokens, salt=salt)
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
    assert store.match_prefix(other, tokens, salt=b"b") == 0
    assert store.match_prefix(other, [5, 6, 7, 8, 1, 2, 3, 4, 5], salt=b"a") == 4
    assert contents(store, other, 4) == marks(tokens[:4]).tolist()


@pytest.mark.parametrize("is_running", [True, False])
def test_a_hit_gives_what_was_computed_whether_its_owner_runs_or_not(make_store: MakeStore, is_running: bool) -> None:
    store = make_store(num_blocks=12)
    tokens = list(range(1, 10))
    owner = hold(store, tokens)
    store.publish(owner, tokens, salt=b"")
    if not is_running:
        store.close(owner)
    other = store.open()
    assert store.match_prefix(other, tokens, salt=b"") == 8
    assert contents(store, other, 8) == marks(tokens[:8]).tolist()
    store.check_integrity({0: 8, 1: 8} if is_running else {0: 8})


def test_the_last_token_is_never_matched(make_store: MakeStore) -> None:
    store = make_store()
    holding = hold(store, [1, 2, 3, 4])
    store.publish(holding, [1, 2, 3, 4], salt=b"")
    other = store.open()
    assert store.match_prefix(other, [1, 2, 3, 4], salt=b"") == 0
    assert store.match_prefix(other, [1, 2, 3, 4, 5], salt=b"") == 4


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
    assert store.match_prefix(third, tokens, salt=b"") == 8
    assert contents(store, third, 8) == marks(tokens[:8]).tolist()


@pytest.mark.parametrize("num_tokens", [8, 9, 11])
def test_a_fork_has_its_parents_positions_and_goes_its_own_way(make_store: MakeStore, num_tokens: int) -> None:
    store = make_store(num_blocks=12)
    tokens = list(range(1, 13))
    parent, child = hold(store, tokens), store.open()
    store.fork(parent, child, num_tokens)
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
    everywhere = torch.tensor(list(store.storage.places(poisoned, 0, 12)))
    for layer, each in enumerate(SHAPE.layers):
        keys, values = torch.empty(12, each.heads, each.key_dim), torch.empty(12, each.heads, each.value_dim)
        store.storage.write(layer, everywhere, keys.fill_(torch.nan), values.fill_(torch.nan))
    store.close(poisoned)
    fresh = store.open()
    assert store.reserve(fresh, 12)
    for layer in range(len(SHAPE.layers)):
        keys, values = store.storage.read(layer, torch.tensor([fresh.blocks]))
        assert torch.count_nonzero(keys) == torch.count_nonzero(values) == 0


@pytest.mark.law("Conservation")
def test_random_use_keeps_contents_and_conserves_blocks(make_store: MakeStore) -> None:
    generator = random.Random(11)
    store = make_store(num_blocks=12, num_places=4)
    running: dict[int, tuple[Holding, list[int]]] = {}
    for _ in range(1500):
        action = generator.random()
        if action < 0.1 and running and store.has_common_place:
            parent, tokens = generator.choice(list(running.values()))
            num_tokens = generator.randrange(1, len(tokens) + 1)
            if store.can_reserve(num_tokens):
                child = store.open()
                store.fork(parent, child, num_tokens)
                running[child.place] = (child, tokens[:num_tokens])
        elif action < 0.35 and store.has_common_place:
            tokens = [generator.randrange(1, 3) for _ in range(generator.randrange(1, 12))]
            holding = store.open()
            known = store.match_prefix(holding, tokens, salt=b"")
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


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


@pytest.mark.law("Budget")
def test_memory_is_taken_as_it_is_written_and_given_back() -> None:
    shape = uniform(layers=4, heads=2, key_dim=64, value_dim=64)
    num_blocks, budget = 4096, 4096 * BLOCK_SIZE * 4 * 2 * 128 * 4
    store = KeyValueStore(pages(num_blocks, shape=shape), num_blocks=num_blocks, block_size=BLOCK_SIZE, num_places=4)
    before, key = resident_bytes(), torch.ones(BLOCK_SIZE * 3200, 2, 64)
    for turn in range(6):
        holding = store.open()
        assert store.reserve(holding, len(key))
        places = torch.tensor(store.storage.places(holding, 0, len(key)))
        for layer in range(4):
            store.storage.write(layer, places, key, key)
        assert resident_bytes() - before < budget + key.nbytes + SLACK
        if turn % 2:
            store.publish(holding, [turn] * (BLOCK_SIZE * 3200), salt=b"")
        store.close(holding)
        assert resident_bytes() - before < (budget if turn else 0) + key.nbytes + SLACK
    store.clear()
    assert resident_bytes() - before < key.nbytes + SLACK


def test_given_back_memory_reads_as_zeros_and_nothing_beside_it_is_lost() -> None:
    memory = Reservation(4 * PAGE)
    tensor = memory.tensor((4 * PAGE,), torch.uint8)
    tensor.fill_(7)
    memory.give_back(100, 3 * PAGE + 5)
    assert tensor[:100].eq(7).all()
    assert tensor[100 : 3 * PAGE + 5].eq(0).all()
    assert tensor[3 * PAGE + 5 :].eq(7).all()
    memory.give_back(10, 20)
    assert (tensor[:10].eq(7).all(), tensor[10:20].eq(0).all(), tensor[20:100].eq(7).all()) == (True, True, True)
