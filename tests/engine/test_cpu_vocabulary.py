"""Our own passes over vocabularies give what torch gives."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor

from serve_app.engine.cpu import compiling
from serve_app.engine.cpu.vocabulary import ALL, InPlay, VocabularyKernels, bounds_of, vocabulary_kernels
from serve_app.engine.cpu.vocabulary_kernel import MOST_OTHERS, MOST_VALUES
from serve_app.engine.decoder.openmp import libgomp

pytestmark = [pytest.mark.slow, pytest.mark.skipif(libgomp() is None, reason="needs torch's libgomp")]

VOCABS = (64, 5000, 33_001)
PARTS = (
    ALL,
    InPlay(lowest=-0.5),
    InPlay(highest=0.25, highest_ids=(40, 2000)),
    InPlay(lowest=-0.25, lowest_ids=(0, 30), highest=1.0, highest_ids=(5, 4000)),
    InPlay(lowest=0.5, lowest_ids=(10, 45), highest=0.5, highest_ids=(0, 44)),
)


def found() -> VocabularyKernels:
    made = vocabulary_kernels()
    assert made is not None
    return made


def drawn(rows: int, vocab: int, *, spread: float = 1.0, seed: int = 0) -> Tensor:
    noise = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return (noise * spread).bfloat16().float()


def are_in_play(row: Tensor, part: InPlay) -> Tensor:
    """Said token by token."""
    ids = torch.arange(len(row))
    low = (ids >= part.lowest_ids[0]) & (ids <= part.lowest_ids[1])
    high = (ids >= part.highest_ids[0]) & (ids <= part.highest_ids[1])
    above = (row > part.lowest) | ((row == part.lowest) & low)
    return above & ((row < part.highest) | ((row == part.highest) & high)) & (row > -inf)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("part", PARTS)
def test_blocks_weigh_what_is_in_play(part: InPlay, vocab: int) -> None:
    logits = drawn(5, vocab)
    logits[3, ::7] = -inf
    rows, divisors = [4, 1, 3], torch.tensor([1.0, 0.3, 2.5])
    highest = logits[rows].amax(-1)
    sums = found().weigh(logits, rows, highest, divisors, *bounds_of([part] * 3))
    for at, number in enumerate(rows):
        weights = torch.exp((logits[number].double() - highest[at]) / divisors[at])
        weights = torch.where(are_in_play(logits[number], part), weights, 0.0)
        padded = torch.nn.functional.pad(weights, (0, -vocab % 64)).view(-1, 64).sum(-1)
        torch.testing.assert_close(sums[at], padded, rtol=3e-6, atol=1e-30)
    alone = [found().weigh(logits, [each], highest[at : at + 1], divisors[at : at + 1], *bounds_of([part]))
             for at, each in enumerate(rows)]  # fmt: skip
    assert torch.equal(torch.cat(alone), sums), "a row's numbers are the same in any company"


def test_what_lies_too_far_below_or_above_weighs_nothing_and_hurts_nobody() -> None:
    logits = torch.full((1, 130), -1e30)
    logits[0, 5], logits[0, 6], logits[0, 7] = 3.0, 900.0, inf
    part = InPlay(highest=3.0)
    sums = found().weigh(logits, [0], torch.tensor([3.0]), torch.ones(1), *bounds_of([part]))
    assert sums.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("part", PARTS)
def test_ids_in_play_are_told_from_any_of_them_on(part: InPlay, vocab: int) -> None:
    own = drawn(1, vocab)[0]
    own[::11] = -inf
    expected = torch.nonzero(are_in_play(own, part))[:, 0]
    assert torch.equal(found().ids(own, part, len(expected)), expected)
    if len(expected) > 4:
        assert torch.equal(found().ids(own, part, 2, first=3), expected[3:5])


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("spread", [1e-20, 0.1, 30.0])
def test_values_are_counted_and_tokens_of_others_are_told(spread: float, vocab: int) -> None:
    logits = drawn(11, vocab, spread=spread)
    logits[2, :20], logits[2, 20:30], logits[2, 30], logits[3, 9], logits[3, vocab - 1] = -inf, -0.0, 0.0, 0.1, 1 / 3
    for own, counted in zip(logits, found().count(logits, range(11)), strict=True):
        assert counted is not None
        others = [9, vocab - 1] if own is logits[3] or bool(own[9] == torch.tensor(0.1)) else []
        assert counted.others.tolist() == others
        kept = own.clone() + 0.0
        kept[others] = -inf
        values, numbers = torch.unique(kept[kept > -inf], return_counts=True)
        assert torch.equal(counted.values, values.flip(0))
        assert torch.equal(counted.numbers, numbers.flip(0))


def test_a_row_of_more_values_than_can_be_told_is_left() -> None:
    logits = drawn(3, 20_000)
    logits[1] += torch.linspace(0, 1, 20_000)
    assert [each is None for each in found().count(logits, [0, 1, 2])] == [False, True, False]


@pytest.mark.parametrize("more", [0, 1])
def test_as_many_as_there_is_room_for_are_too_many(more: int) -> None:
    short = (torch.arange(16_384, 16_384 + MOST_VALUES - 1 + more, dtype=torch.int32) << 16).view(torch.float32)
    values = short[short.isfinite()].repeat(2)
    assert len(values) == 2 * (MOST_VALUES - 1 + more)
    others = torch.cat((torch.zeros(1000), torch.full((MOST_OTHERS - 1 + more,), 0.1)))
    for each, count in ((values, MOST_VALUES - 1), (others, 1)):
        (counted,) = found().count(each[None], [0])
        assert (counted is None) is bool(more)
        if counted is not None:
            assert (len(counted.values), int(counted.numbers.sum()) + len(counted.others)) == (count, len(each))
            assert counted.others.tolist() == torch.nonzero(each == torch.tensor(0.1))[:, 0].tolist()


def test_a_machine_without_kernels_draws_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compiled", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("none here")))
    vocabulary_kernels.cache_clear()
    try:
        assert vocabulary_kernels() is None
    finally:
        vocabulary_kernels.cache_clear()
