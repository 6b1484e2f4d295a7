"""The ledger of blocks: conserved, prefixes found, the ends of chains dropped first, hits kept under pressure."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import accumulate

import pytest

from serve_app.engine.kv.ledger import BlockLedger, block_hashes


def names_of(document: int, length: int) -> list[bytes]:
    return [b"%d/%d" % (document, index) for index in range(length)]


def cache(ledger: BlockLedger, names: list[bytes]) -> None:
    """Compute a chain as a sequence does: hold what is known, take the rest, name it, let go."""
    known = ledger.match(names)
    for block in known:
        ledger.share(block)
    count = min(len(names) - len(known), ledger.num_available)
    blocks = known + ledger.take(count)
    for index, block in enumerate(blocks):
        ledger.name(block, names[index], parent=names[index - 1] if index else None)
    ledger.drop(blocks)


def test_a_chain_larger_than_the_budget_leaves_its_beginning_to_be_found() -> None:
    ledger = BlockLedger(10)
    names = names_of(0, 20)
    cache(ledger, names)
    assert ledger.num_cached == 10
    assert len(ledger.match(names)) == 10


def test_a_chain_loses_its_end_first() -> None:
    ledger = BlockLedger(20)
    names = names_of(0, 20)
    cache(ledger, names)
    held = ledger.take(7)
    assert ledger.num_cached == 13
    assert len(ledger.match(names)) == 13
    ledger.drop(held)
    ledger.check_integrity([])


def test_the_chain_unused_for_longest_gives_way_first() -> None:
    ledger = BlockLedger(6)
    first, second, third = (names_of(document, 2) for document in range(3))
    for names in (first, second, third):
        cache(ledger, names)
    ledger.match(first)
    ledger.take(2)
    assert [len(ledger.match(names)) for names in (first, second, third)] == [2, 0, 2]


def test_a_beginning_that_others_go_on_from_outlives_their_ends() -> None:
    ledger = BlockLedger(6)
    shared = names_of(0, 2)
    cache(ledger, [*shared, b"a", b"b"])
    cache(ledger, [*shared, b"c", b"d"])
    ledger.take(4)
    assert len(ledger.match(shared)) == 2


def test_a_held_end_does_not_keep_its_beginning_from_giving_way() -> None:
    ledger = BlockLedger(4)
    cache(ledger, [b"a"])
    child = ledger.take(1)
    ledger.name(child[0], b"b", parent=b"a")
    assert ledger.num_available == 3
    ledger.take(3)
    assert ledger.match([b"a"]) == []
    ledger.drop(child)
    assert ledger.num_available == 1


def test_two_chains_of_the_same_tokens_are_cached_once() -> None:
    ledger = BlockLedger(4)
    one, other = ledger.take(1), ledger.take(1)
    assert ledger.name(one[0], b"a", parent=None)
    assert not ledger.name(other[0], b"a", parent=None)
    assert ledger.drop(other) == other
    assert ledger.drop(one) == []
    ledger.check_integrity([])


@pytest.mark.law("Conservation")
@pytest.mark.parametrize("seed", range(5))
def test_random_use_conserves_blocks(seed: int) -> None:
    generator = random.Random(seed)
    ledger = BlockLedger(12)
    tables: list[list[int]] = []
    for _ in range(2000):
        if generator.random() < 0.5 or not tables:
            names = names_of(generator.randrange(3), generator.randrange(1, 5))
            table = []
            for block in ledger.match(names):
                if generator.random() < 0.5 and block in ledger._num_holders:
                    break
                ledger.share(block)
                table.append(block)
            table += ledger.take(min(generator.randrange(3), ledger.num_available))
            for index, block in enumerate(table[: len(names)]):
                if generator.random() < 0.8:
                    ledger.name(block, names[index], parent=names[index - 1] if index else None)
            tables.append(table)
        else:
            ledger.drop(tables.pop(generator.randrange(len(tables))))
        ledger.check_integrity(tables)
        assert ledger.num_free + ledger.num_held + ledger.num_cached == 12


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "exponent"), [(1, 1.0), (2, 1.0), (3, 0.8), (4, 1.2)])
def test_under_pressure_most_of_the_hits_of_an_oracle_are_kept(seed: int, exponent: float) -> None:
    """A working set of twice the budget, asked for in Zipf order; an oracle evicts what is wanted last (Belady)."""
    generator = random.Random(seed)
    lengths = [generator.randrange(1, 17) for _ in range(200)]
    weights = list(accumulate(1.0 / (rank + 1) ** exponent for rank in range(len(lengths))))
    order = [bisect_left(weights, generator.random() * weights[-1]) for _ in range(4000)]
    budget = sum(lengths) // 2
    ledger = BlockLedger(budget)
    hits = 0
    for document in order:
        names = names_of(document, lengths[document])
        hits += len(ledger.match(names))
        cache(ledger, names)
    assert hits >= 0.6 * oracle_hits(order, lengths, budget)


def oracle_hits(order: list[int], lengths: list[int], budget: int) -> int:
    """Hits in blocks of the cache that drops the ends of chains that are wanted again last."""
    uses: dict[int, list[int]] = {}
    for turn, document in enumerate(order):
        uses.setdefault(document, []).append(turn)
    kept: dict[int, int] = {}
    hits = 0
    for turn, document in enumerate(order):
        hits += kept.get(document, 0)
        kept[document] = lengths[document]
        excess = sum(kept.values()) - budget

        def next_use(other: int, now: int = turn) -> int:
            place = bisect_left(uses[other], now + 1)
            return uses[other][place] if place < len(uses[other]) else len(order)

        for other in sorted(kept, key=next_use, reverse=True):
            taken = min(max(excess, 0), kept[other])
            kept[other] -= taken
            excess -= taken
            if excess <= 0:
                break
    return hits


@pytest.mark.parametrize("change", [0, 3, 4, 7])
def test_a_block_hash_depends_on_everything_before_it(change: int) -> None:
    tokens = list(range(12))
    other = list(tokens)
    other[change] += 1
    hashes, others = list(block_hashes(tokens, 4, salt=b"")), list(block_hashes(other, 4, salt=b""))
    first_changed = change // 4
    assert hashes[:first_changed] == others[:first_changed]
    assert not set(hashes[first_changed:]) & set(others[first_changed:])


def test_hashes_go_on_from_those_that_are_known() -> None:
    tokens = list(range(22))
    hashes = list(block_hashes(tokens, 4, salt=b"s"))
    assert list(block_hashes(tokens, 4, salt=b"s", known=hashes[:2])) == hashes[2:]
