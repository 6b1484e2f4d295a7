"""Of what has ended a piece at a time is moved to the cache, and everything is there meanwhile, once, and found."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.kv.storage import KeyValueShape
from serve_app.engine.kv.store import KeyValueStore
from tests.engine.test_pending import TEXT, Holder, Holders, KeepsNothing, carry_on
from tests.engine.test_store import BLOCK_SIZE

PAGE_WIDE = KeyValueShape.uniform(layers=2, heads=1, key_dim=256, value_dim=256)
"""Of which a block fills a page, in every layer."""


def ended(holders: Holders, *more: int) -> Holder:
    """One of seven blocks, six of them named, beside another that goes on."""
    made = holders.find([*TEXT, 1, 2, 3, *more])
    assert made is not None
    holders.compute()
    holders.publish(made)
    holders.close(made, at_once=False)
    holders.check()
    return made


def num_moved(store: KeyValueStore) -> int:
    return store.num_cached_blocks - store._releases.num_blocks


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from([9, 14, 24, 60]))
def test_whatever_comes_meanwhile_everybody_gets_what_was_computed(seed: int, num_blocks: int) -> None:
    generator = random.Random(seed)
    holders = Holders(num_blocks=num_blocks, shape=PAGE_WIDE)
    carry_on(holders, generator, are_named=True, is_at_once=lambda: generator.random() < 0.2)
    for _ in range(20 * num_blocks):
        holders.fill(BLOCK_SIZE)
    holders.check()
    assert not holders.store._releases
    assert num_moved(holders.store) == holders.store.num_cached_blocks


def test_it_is_moved_a_piece_at_a_time_and_then_the_place_is_free() -> None:
    holders = Holders(num_blocks=24, shape=PAGE_WIDE)
    ended(holders)
    assert (holders.store.num_cached_blocks, num_moved(holders.store), len(holders.store._free_places)) == (6, 0, 4)
    for expected in (2, 4):
        holders.fill(4 * BLOCK_SIZE)  # half of it is for what ends
        holders.check()
        assert (num_moved(holders.store), len(holders.store._free_places)) == (expected, 4)
    holders.fill(1)
    holders.fill(1)
    holders.check()
    assert (num_moved(holders.store), len(holders.store._free_places)) == (6, 5)


def test_who_finds_it_has_it_moved_at_once() -> None:
    holders = Holders(num_blocks=24, shape=PAGE_WIDE)
    ended(holders)
    found = holders.find([*TEXT, 7])
    assert found is not None
    assert (found.num_known, len(holders.store._releases)) == (20, 0)
    while found.holding.pending:
        holders.fill(BLOCK_SIZE)
        holders.check()
    holders.compute()
    holders.check()


def test_who_needs_a_place_has_the_oldest_one_emptied() -> None:
    holders = Holders(num_blocks=60, shape=PAGE_WIDE)
    for number in range(5):
        made = holders.find([number * 10 + each for each in range(1, 26)])
        assert made is not None
    holders.compute()
    for each in list(holders.all):
        holders.publish(each)
        holders.close(each, at_once=False)
    assert (len(holders.store._releases), len(holders.store._free_places)) == (5, 0)
    assert holders.store.has_common_place
    other = holders.find([99])
    assert other is not None
    assert other.holding.place == 0
    holders.check()
    assert len(holders.store._releases) == 4
    assert holders.store.num_cached_blocks == 30


def test_what_is_evicted_before_it_was_moved_takes_no_memory() -> None:
    holders = Holders(num_blocks=9, shape=PAGE_WIDE)
    ended(holders)
    assert holders.find([50, *range(60, 79)]) is not None  # five blocks, of which two are evicted
    assert holders.store._releases.num_blocks == holders.store.num_cached_blocks == 4
    holders.check()
    holders.compute()
    holders.check()
    for _ in range(4):
        holders.fill(BLOCK_SIZE)
        holders.check()
    assert num_moved(holders.store) == 4


def test_what_cannot_be_moved_is_found_by_nobody_and_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    holders = Holders(num_blocks=24, shape=PAGE_WIDE)
    other = holders.find([40, 41, 42, 43, 44])
    assert other is not None
    ended(holders)
    holders.exchange(KeepsNothing(holders.storage))
    with caplog.at_level(logging.ERROR):
        holders.fill(BLOCK_SIZE)
    assert "what is cached is lost" in caplog.text
    holders.exchange(holders.storage)
    holders.check()
    assert (holders.store.num_cached_blocks, len(holders.store._free_places)) == (0, 4)
    found = holders.find([*TEXT, 7])
    assert found is not None
    assert found.num_known == 0


def test_it_is_moved_whole_where_nobody_would_wait_or_little_is_kept_or_some_of_it_is_free() -> None:
    holders = Holders(num_blocks=60, shape=PAGE_WIDE)
    first, second = holders.find([*TEXT, 1, 2]), holders.find([*TEXT, 3, 4, 5, 6, 7])
    assert first is not None
    assert second is not None
    holders.compute()
    for each in (first, second):
        holders.publish(each)
    holders.close(first, at_once=True)
    holders.close(second, at_once=False)  # its first blocks have the names of the other's
    short = holders.find([70, 71, 72, 73, 74])
    assert short is not None
    holders.compute()
    holders.publish(short)
    holders.close(short, at_once=False)
    holders.check()
    assert not holders.store._releases
    assert len(holders.store._free_places) == 5


def test_all_of_it_goes_with_everything_else() -> None:
    holders = Holders(num_blocks=24, shape=PAGE_WIDE)
    ended(holders)
    holders.store.clear()
    holders.check()
    assert (holders.store.num_cached_blocks, len(holders.store._free_places)) == (0, 5)
