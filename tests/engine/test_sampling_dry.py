"""DRY: which tokens would continue a repetition, and what it costs them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from serve_app.core.request import DryParams
from serve_app.engine.sampling.state import Repeats, z_function
from tests.engine.sampling_reference import dry_penalties

pytestmark = pytest.mark.slow

A, B, C, X = range(4)


def penalties(tokens: list[int], params: DryParams) -> dict[int, float]:
    repeats = Repeats(params)
    repeats.catch_up(tokens)
    return charged(repeats)


def charged(repeats: Repeats) -> dict[int, float]:
    token_ids, values = repeats.penalties()
    assert len(set(token_ids.tolist())) == len(token_ids)
    return dict(zip(token_ids.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize(
    ("tokens", "params", "expected"),
    [
        ([A, B, C, A, B], DryParams(multiplier=0.8), {C: 0.8}),
        ([X, A, B, C, X, A, B], DryParams(multiplier=0.8), {C: 1.4}),
        ([A, B, C, B], DryParams(multiplier=0.8), {}),  # a run of one is allowed
        ([A, B, C, B], DryParams(multiplier=0.8, allowed_length=1), {C: 0.8}),
        ([A, B, C, B], DryParams(multiplier=0.8, allowed_length=0), {C: 0.8 * 1.75}),
        ([A, B, C, A, B], DryParams(multiplier=0.8, breakers=((B,),)), {}),  # it ends with a breaker
        ([A, B, C, A, B], DryParams(multiplier=0.8, breakers=((A,),)), {}),  # only B is left of the run
        ([A, B, C, A, B], DryParams(multiplier=0.8, breakers=((C,),)), {}),  # C itself ends runs
        ([X, A, B, C, X, A, B], DryParams(multiplier=0.8, breakers=((C, X),)), {C: 0.8}),
        ([X, A, B, C, X, A, B], DryParams(multiplier=0.8, window=6), {C: 0.8}),
        ([X, A, B, C, X, A, B], DryParams(multiplier=0.8, window=4), {}),
        ([X, A, B, C, X, A, B], DryParams(multiplier=0.8, window=0), {}),
        ([A], DryParams(multiplier=0.8, allowed_length=0), {}),
        # the longest run counts: `x a b` before c, only `a b` before x
        ([X, A, B, C, A, B, X, C, X, A, B], DryParams(multiplier=1.0, base=2.0), {C: 2.0, X: 1.0}),
    ],
)
def test_a_token_is_charged_for_the_longest_run_it_would_continue(
    tokens: list[int], params: DryParams, expected: dict[int, float]
) -> None:
    assert penalties(tokens, params) == pytest.approx(expected)
    assert dry_penalties(tokens, params) == pytest.approx(expected)


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    first=st.integers(1, 40),
    allowed_length=st.integers(0, 4),
    window=st.sampled_from([None, 1, 3, 8, 20]),
    breakers=st.sampled_from([(), ((3,),), ((2, 3),), ((1, 1), (0, 2, 0))]),
)
def test_runs_followed_token_by_token_are_those_of_walking_back(
    tokens: list[int], first: int, allowed_length: int, window: int | None, breakers: tuple[tuple[int, ...], ...]
) -> None:
    params = DryParams(multiplier=0.8, base=1.1, allowed_length=allowed_length, window=window, breakers=breakers)
    repeats = Repeats(params)
    for end in range(min(first, len(tokens)), len(tokens) + 1):
        repeats.catch_up(tokens[:end])
        assert charged(repeats) == pytest.approx(dry_penalties(tokens[:end], params)), tokens[:end]


def test_the_penalty_of_a_very_long_run_is_still_a_number() -> None:
    tokens = [A] * 2000
    costly = penalties(tokens, DryParams(multiplier=5.0, base=4.0))
    assert 1e30 < costly[A] <= 3e38
    flat = penalties(tokens, DryParams(multiplier=5.0, base=1.0))
    assert flat == {A: 5.0}


class CountedLookups(list[int]):
    """A list that counts how often it is asked for an item."""

    lookups = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def, override]
        self.lookups += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("tokens", [[A] * 3000, [A, B] * 1500, [A, A, B] * 1000])
def test_finding_all_runs_takes_linear_work(tokens: list[int]) -> None:
    counted = CountedLookups(tokens)
    z_function(counted)
    assert 0 < counted.lookups <= 4 * len(tokens)


@pytest.mark.law("Bounded work")
@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize("tokens", [[A] * 3000, [A, B] * 1500, [A, *range(3000)]])
def test_a_step_looks_at_few_tokens_however_repetitive_the_text_is(tokens: list[int], window: int | None) -> None:
    counted = CountedLookups(tokens)
    params = DryParams(multiplier=0.8, allowed_length=1, window=window, breakers=((A, A, B), (C, X)))
    repeats = Repeats(params)
    repeats.catch_up(counted)
    for token in (A, B, A, A):
        counted.append(token)
        counted.lookups = 0
        repeats.catch_up(counted)
        repeats.penalties()
        assert 0 < counted.lookups <= 8
    assert charged(repeats) == pytest.approx(dry_penalties(list(counted), params))


class NewNumbers(TorchDispatchMode):
    """Counts the numbers in the tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        is_new = isinstance(result, Tensor) and not func.is_view and not func._schema.is_mutable
        self.count += result.numel() if is_new else 0
        return result


def test_a_step_in_text_that_repeats_little_touches_little_however_long_the_text_is() -> None:
    tokens = [place % 4001 for place in range(20_000)]  # each token five times
    repeats = Repeats(DryParams(multiplier=0.8, allowed_length=30_000))
    repeats.catch_up(tokens)
    tokens.append(7)  # room for more is made here
    repeats.catch_up(tokens)
    for token in (8, 9, 7, 10, 5000, 5000):
        tokens.append(token)
        with NewNumbers() as new:
            repeats.catch_up(tokens)
            repeats.penalties()
        assert new.count < 100
