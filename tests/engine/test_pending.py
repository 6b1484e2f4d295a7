"""What is found or forked is moved little by little, and whole in the end whatever becomes of where it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.kv.storage import Holding, KeyValueShape, Storage
from serve_app.engine.kv.store import KeyValueStore
from tests.engine.harness import exchange_storage
from tests.engine.test_store import BLOCK_SIZE, SHAPE, contents, fill, hold, lanes, marks, pages

NUM_PLACES = 5
TEXT = list(range(1, 24))


@dataclass(eq=False)
class Holder:
    """As a sequence: tokens of which the first ones need not be computed, and the rest once these are there."""

    holding: Holding
    tokens: list[int]
    num_known: int
    is_computed: bool = False


class Holders:
    """Use a store as a scheduler does, and look at everything that is to be there."""

    def __init__(self, *, num_blocks: int, shape: KeyValueShape = SHAPE) -> None:
        self.shape = shape
        self.storage = lanes(num_blocks, NUM_PLACES, shape=shape, moved_bytes=1)  # pieces as small as pages allow
        self.store = KeyValueStore(self.storage, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_places=NUM_PLACES)
        self.all: list[Holder] = []

    def find(self, tokens: Sequence[int]) -> Holder | None:
        holding = self.store.open()
        found = Holder(holding, list(tokens), self.store.match_prefix(holding, tokens, salt=b""))
        self.all.append(found)
        if self.store.reserve(holding, len(tokens)):
            return found
        self.close(found)
        return None

    def fork(self, parent: Holder, num_tokens: int) -> Holder:
        child = Holder(self.store.open(), parent.tokens[:num_tokens], num_tokens)
        self.all.append(child)
        self.store.fork(parent.holding, child.holding, num_tokens)
        return child

    def compute(self) -> None:
        for each in self.all:
            if not each.is_computed and not each.holding.pending:
                if each.num_known < len(each.tokens):
                    fill(self.store, each.holding, each.tokens, each.num_known, shape=self.shape)
                each.is_computed = True

    def fill(self, most: int) -> None:
        before = self.store.num_copied_tokens
        self.store.fill(most)
        assert self.store.num_copied_tokens - before <= max(most, BLOCK_SIZE)

    def grow(self, each: Holder, more: Sequence[int]) -> None:
        """As one that decodes, maybe beside some that copy what it has had before."""
        if more and self.store.reserve(each.holding, len(each.tokens) + len(more)):
            fill(self.store, each.holding, [*each.tokens, *more], len(each.tokens), shape=self.shape)
            each.tokens += more

    def publish(self, each: Holder) -> None:
        self.store.publish(each.holding, each.tokens if each.is_computed else each.tokens[: each.num_known], salt=b"")

    def close(self, each: Holder, *, at_once: bool = True) -> None:
        if not at_once:
            self.publish(each)
        self.all.remove(each)
        self.store.close(each.holding, at_once=at_once)

    def exchange(self, storage: object) -> None:
        exchange_storage(self.store, storage)

    def check(self) -> None:
        lengths = {each.holding.place: len(each.tokens) if each.is_computed else each.num_known for each in self.all}
        self.store.check_integrity(lengths)
        for each in self.all:
            known = len(each.tokens) if each.is_computed else min(each.num_known, each.holding.num_filled * BLOCK_SIZE)
            if known:
                assert contents(self.store, each.holding, known) == marks(each.tokens[:known]).tolist()
        self._check_memory()

    def _check_memory(self) -> None:
        """Nothing is on lanes that nobody is on, and in the pool is what is cached or still to be brought, alone.

        But for what is cached on a lane that is still to be emptied: it is there, and not in the pool.
        """
        ledger = self.store._ledger
        unfetched = {
            each.holding.blocks[index]
            for each in self.all
            for index, source in each.holding.pending.items()
            if source is None
        }
        kept = unfetched | (ledger._name_of.keys() - ledger._num_holders.keys())
        releases = self.store._releases._releases
        not_moved = {block for each in releases for block in each.blocks}
        assert not_moved <= kept
        void = sorted(set(range(ledger.num_blocks)) - kept | not_moved)
        for group in self.storage._layer_groups.values():
            assert not group.pool[void].any()
            assert not group.lanes[:, self.store._free_places].any()
            for each in releases:
                there = [index * BLOCK_SIZE + at for index in each.indices for at in range(BLOCK_SIZE)]
                is_void = torch.ones(group.lanes.shape[2], dtype=torch.bool).index_fill_(
                    0, torch.tensor(there, dtype=torch.int64), False
                )
                assert not group.lanes[:, each.holding.place, is_void].any()


def carry_on(
    holders: Holders, generator: random.Random, *, are_named: bool, is_at_once: Callable[[], bool] = lambda: True
) -> None:
    """Do what a scheduler does in any order, look at everything after each step, and end all.

    is_at_once: asked for each close
    """
    for _ in range(120):
        action = generator.random()
        computed = [each for each in holders.all if each.is_computed]
        if action < 0.3 and holders.store.has_common_place:
            own = [generator.randrange(1, 3) for _ in range(generator.randrange(1, 6))]
            holders.find([*TEXT[: generator.randrange(len(TEXT))], *own])
        elif action < 0.45 and computed and holders.store.has_common_place:
            parent = generator.choice(computed)
            num_tokens = generator.randrange(1, len(parent.tokens) + 1)
            if holders.store.can_reserve(num_tokens):
                holders.fork(parent, num_tokens)
        elif action < 0.7:
            holders.fill(generator.randrange(1, 3 * BLOCK_SIZE))
            holders.compute()
        elif action < 0.8 and computed:
            growing = generator.choice(computed)
            holders.grow(growing, [1, 2, 3][: 32 - len(growing.tokens)])
        elif action < 0.88 and are_named and holders.all:
            holders.publish(generator.choice(holders.all))
        elif holders.all:
            holders.close(generator.choice(holders.all), at_once=is_at_once())
        holders.check()
    while holders.store.fill_first():
        holders.check()
    holders.compute()
    holders.check()
    while holders.all:
        holders.close(generator.choice(holders.all), at_once=is_at_once())
        holders.check()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from([14, 24, 60]), are_named=st.booleans())
def test_whatever_ends_meanwhile_everybody_gets_what_was_computed(seed: int, num_blocks: int, are_named: bool) -> None:
    holders = Holders(num_blocks=num_blocks)
    carry_on(holders, random.Random(seed), are_named=are_named)
    assert not holders.store.num_pending_tokens


def computed(holders: Holders, *, is_named: bool = True) -> Holder:
    made = holders.find([*TEXT, 1])
    assert made is not None
    holders.compute()
    if is_named:
        holders.publish(made)
    return made


@pytest.mark.parametrize("is_running", [True, False])
def test_what_is_found_comes_a_few_blocks_at_a_time(is_running: bool) -> None:
    holders = Holders(num_blocks=24)
    source = computed(holders)
    if not is_running:
        holders.close(source)
    found = holders.find([*TEXT, 2])
    assert found is not None
    assert (found.num_known, holders.store.num_pending_tokens, found.holding.num_filled) == (20, 20, 0)
    for num_filled in (2, 4, 5):
        holders.fill(2 * BLOCK_SIZE + 1)
        holders.check()
        assert found.holding.num_filled == num_filled or not found.holding.pending
    assert not found.holding.pending
    assert holders.store.num_copied_tokens == 20


def test_less_than_a_block_fills_one_nevertheless() -> None:
    holders = Holders(num_blocks=24)
    child = holders.fork(computed(holders), 11)
    holders.store.fill(1)
    assert child.holding.num_filled == 1
    holders.check()


@pytest.mark.parametrize("is_named", [True, False])
def test_several_go_on_from_the_one_that_has_ended_and_it_is_copied_for_none_of_them(is_named: bool) -> None:
    holders = Holders(num_blocks=24)
    source = computed(holders, is_named=is_named)
    children = [holders.fork(source, num_tokens) for num_tokens in (14, 23, 9)]
    holders.fill(BLOCK_SIZE)
    before = holders.store.num_copied_tokens
    holders.close(source)
    assert holders.store.num_copied_tokens == before
    holders.check()
    holders.close(children[0])
    holders.check()
    holders.fill(100)
    holders.compute()
    assert all(each.is_computed for each in holders.all)
    holders.check()


def test_who_ends_before_it_has_all_leaves_the_rest_where_it_is() -> None:
    holders = Holders(num_blocks=8)
    holders.close(computed(holders))
    assert holders.store.num_cached_blocks == 6
    for _ in range(2):
        found = holders.find([*TEXT, 2])
        assert found is not None
        holders.fill(2 * BLOCK_SIZE)
        before = holders.store.num_copied_tokens
        holders.close(found)
        assert (holders.store.num_cached_blocks, holders.store.num_copied_tokens) == (6, before)
        holders.check()


def test_a_short_prefix_does_not_wait_for_a_long_one_and_that_gets_on() -> None:
    holders = Holders(num_blocks=40)
    source = computed(holders)
    long, *short = (holders.fork(source, num_tokens) for num_tokens in (20, 8, 4, 4))
    for expected in ([1, 0, 1, 0], [2, 0, 1, 1], [3, 1, 1, 1], [4, 2, 1, 1], [5, 2, 1, 1]):
        holders.fill(2 * BLOCK_SIZE)
        assert [each.holding.num_filled for each in (long, *short)] == expected
        holders.check()


def test_who_passes_the_one_that_it_copies_from_waits_for_it() -> None:
    holders = Holders(num_blocks=40)
    source = computed(holders)
    heir, other = holders.fork(source, 20), holders.fork(source, 12)
    holders.close(source)
    for expected in ([1, 1], [2, 2], [3, 3], [5, 3]):
        holders.fill(2 * BLOCK_SIZE)
        assert [each.holding.num_filled for each in (heir, other)] == expected
        holders.check()


class KeepsNothing:
    """A storage that fails where it shall keep something."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    def keep(self, holding: Holding, indices: Sequence[int]) -> None:
        raise MemoryError("no more")


def test_what_was_to_come_from_one_that_could_not_be_kept_is_given_to_nobody() -> None:
    holders = Holders(num_blocks=24)
    source = computed(holders)
    found = [holders.find([*TEXT, number]) for number in (2, 3)]
    holders.fill(BLOCK_SIZE)
    holders.exchange(KeepsNothing(holders.storage))
    with pytest.raises(MemoryError):
        holders.close(source)
    holders.exchange(holders.storage)
    with pytest.raises(AssertionError, match="lost"):
        holders.store.fill(100)
    assert found[0] is not None
    holders.close(found[0])
    with pytest.raises(AssertionError, match="lost"):
        holders.store.fill(100)
    holders.store.clear()
    holders.all.clear()
    holders.check()


def test_where_running_sequences_share_blocks_nothing_is_pending() -> None:
    store = KeyValueStore(pages(24, NUM_PLACES), num_blocks=24, block_size=BLOCK_SIZE, num_places=NUM_PLACES)
    owner = hold(store, TEXT)
    store.publish(owner, TEXT, salt=b"")
    found, child = store.open(), store.open()
    assert store.match_prefix(found, TEXT, salt=b"") == 20
    store.fork(owner, child, 22)
    assert store.num_pending_tokens == 0
    assert contents(store, child, 22) == marks(TEXT[:22]).tolist()
