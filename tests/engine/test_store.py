"""The key/value store: lanes stay dense, blocks are conserved, hits copy what was computed."""

from __future__ import annotations

import random

import pytest
import torch

from serve_app.engine.kv.prefix import PrefixIndex, block_hashes
from serve_app.engine.kv.store import KeyValueShape, KeyValueStore

SHAPE = KeyValueShape(layers=2, heads=1, key_dim=2, value_dim=3)


def make_store(*, num_blocks: int = 6, num_lanes: int = 3) -> KeyValueStore:
    return KeyValueStore(
        SHAPE,
        num_lanes=num_lanes,
        max_model_len=32,
        num_blocks=num_blocks,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def fill(store: KeyValueStore, lane: int, token_ids: list[int]) -> None:
    """Write keys and values that name their token and position."""
    marks = torch.tensor([float(token * 100 + i) for i, token in enumerate(token_ids)])
    store.keys[:, lane, : len(token_ids)] = marks[None, :, None, None]
    store.values[:, lane, : len(token_ids)] = -marks[None, :, None, None]


def test_reserving_beyond_the_budget_is_refused_and_changes_nothing() -> None:
    store = make_store(num_blocks=3)
    first, second = store.open_lane(), store.open_lane()
    assert store.reserve(first, 8)
    assert not store.reserve(second, 5)
    assert store.num_free_blocks == 1
    assert store.reserve(second, 4)
    assert store.num_free_blocks == 0


def test_closing_a_lane_moves_the_last_one_into_the_gap_with_its_contents() -> None:
    store = make_store()
    for lane, tokens in enumerate(([1] * 4, [2] * 4, [3, 4, 5, 6, 7])):
        assert store.open_lane() == lane
        assert store.reserve(lane, len(tokens))
        fill(store, lane, tokens)
    expected = store.keys[:, 2, :5].clone()
    assert store.close_lane(0, last_length=5) == 2
    assert torch.equal(store.keys[:, 0, :5], expected)
    assert store.num_lanes_in_use == 2
    assert store.num_free_blocks == 6 - 1 - 2
    assert store.close_lane(1, last_length=4) is None


def test_a_published_prefix_is_found_under_its_salt_only_and_copied() -> None:
    store = make_store()
    lane = store.open_lane()
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    store.reserve(lane, len(tokens))
    fill(store, lane, tokens)
    assert store.publish(lane, tokens, 0, salt=b"a") == 2
    other = store.open_lane()
    assert store.match_prefix(other, tokens, salt=b"b") == 0
    assert store.match_prefix(other, [5, 6, 7, 8, 1, 2, 3, 4, 5], salt=b"a") == 4
    assert torch.equal(store.keys[:, other, :4], store.keys[:, lane, :4])
    assert torch.equal(store.values[:, other, :4], store.values[:, lane, :4])


def test_the_last_token_is_never_matched() -> None:
    store = make_store()
    lane = store.open_lane()
    tokens = [1, 2, 3, 4]
    store.reserve(lane, 4)
    fill(store, lane, tokens)
    store.publish(lane, tokens, 0, salt=b"")
    other = store.open_lane()
    assert store.match_prefix(other, tokens, salt=b"") == 0
    assert store.match_prefix(other, [*tokens, 5], salt=b"") == 4


def test_cached_blocks_give_way_to_live_ones_the_ends_of_old_chains_first() -> None:
    store = make_store(num_blocks=4)
    lane = store.open_lane()
    tokens = list(range(1, 9))
    store.reserve(lane, 8)
    fill(store, lane, tokens)
    store.publish(lane, tokens, 0, salt=b"")
    store.close_lane(lane, last_length=8)
    assert (store.num_cached_blocks, store.num_free_blocks) == (2, 2)
    lane = store.open_lane()
    assert store.match_prefix(lane, [*tokens[:4], 0], salt=b"") == 4  # uses the chain's beginning
    assert store.reserve(lane, 12)  # needs three blocks: one free is left, one cached must go
    assert store.num_cached_blocks == 1
    store.close_lane(lane, last_length=12)
    lane = store.open_lane()
    assert store.match_prefix(lane, [*tokens, 0], salt=b"") == 4, "the beginning should be what is left"


def test_random_use_conserves_blocks() -> None:
    generator = random.Random(11)
    store = make_store(num_blocks=10, num_lanes=4)
    lengths: list[int] = []
    for _ in range(3000):
        action = generator.random()
        if action < 0.3 and store.has_free_lane:
            lane = store.open_lane()
            lengths.append(store.match_prefix(lane, [generator.randrange(2) for _ in range(9)], salt=b""))
        elif action < 0.7 and lengths:
            lane = generator.randrange(len(lengths))
            wanted = min(32, lengths[lane] + generator.randrange(1, 6))
            if store.reserve(lane, wanted):
                lengths[lane] = wanted
                fill(store, lane, [generator.randrange(2) for _ in range(wanted)])
        elif action < 0.85 and lengths:
            lane = generator.randrange(len(lengths))
            store.publish(lane, [generator.randrange(2) for _ in range(lengths[lane])], 0, salt=b"")
        elif lengths:
            lane = generator.randrange(len(lengths))
            moved = store.close_lane(lane, last_length=lengths[-1])
            last = lengths.pop()
            if moved is not None:
                lengths[lane] = last
        store.check_integrity(lengths)
        held = sum(store.blocks_for(length) for length in lengths)
        assert held + store.num_cached_blocks + store.num_free_blocks <= store.num_blocks


@pytest.mark.parametrize("change", [0, 3, 4, 7])
def test_a_block_hash_depends_on_everything_before_it(change: int) -> None:
    tokens = list(range(12))
    other = list(tokens)
    other[change] += 1
    hashes, others = list(block_hashes(tokens, 4, salt=b"")), list(block_hashes(other, 4, salt=b""))
    first_changed = change // 4
    assert hashes[:first_changed] == others[:first_changed]
    assert not set(hashes[first_changed:]) & set(others[first_changed:])


def test_an_index_evicts_what_was_unused_for_longest() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    for name in ("a", "b", "c"):
        index.add(name.encode(), name)
    assert index.match(iter([b"a"])) == ["a"]
    index.evict()
    assert b"b" not in index
    assert b"a" in index
