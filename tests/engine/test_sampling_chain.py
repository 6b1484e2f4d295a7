"""The chain against its definitions, on any number of candidates, in any order of its stages."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from serve_app.core.request import TEMPERATURE_FIRST, TEMPERATURE_LAST, LogprobParams, SamplerName, SamplingParams
from serve_app.engine.sampling.candidates import Rest, choose_candidates
from serve_app.engine.sampling.draw import NUM_CANDIDATES, draw_tokens
from serve_app.engine.sampling.stages import (
    STAGES,
    Parameters,
    order_of,
    run_chain,
    run_whole_chain,
    stages_of,
    weights_of,
)
from tests.engine.sampling_reference import distribution, row

pytestmark = pytest.mark.slow

DISPENSABLE = tuple(name for name in TEMPERATURE_FIRST if name in STAGES)


def outcome(logits: Tensor, params: SamplingParams, count: int, *, mu: float = 0.0) -> dict[int, float] | None:
    """What the chain leaves of one row [vocab] on so many candidates; None where they do not settle it."""
    sequence = row(params)
    sequence.sampling_state.mu = mu
    chain = stages_of(order_of(params))
    parameters = Parameters.of_sequences([sequence], logits.device)
    found = run_chain(choose_candidates(logits[None], count), chain, parameters, logits[None])
    if found.rest[0] == Rest.UNKNOWN:
        return None
    if found.rest[0] == Rest.GONE:
        weights, ids, is_kept = weights_of(found)[0], found.token_ids[0], found.kept[0]
    else:  # no stage has dropped any
        weights, ids = torch.softmax(logits.double() / found.divisor, dim=-1), torch.arange(len(logits))
        is_kept = weights > 0
    return dict(zip(ids[is_kept].tolist(), (weights / weights.sum())[is_kept].tolist(), strict=True))


def full_outcome(logits: Tensor, params: SamplingParams, *, mu: float) -> dict[int, float]:
    """What the chain leaves of one row [vocab] with every token in view."""
    sequence = row(params)
    sequence.sampling_state.mu = mu
    parameters = Parameters.of_sequences([sequence], logits.device)
    full = run_whole_chain(logits[None], stages_of(order_of(params)), parameters)
    weights, is_kept = weights_of(full)[0], full.kept[0]
    assert not weights[~is_kept].any()
    return dict(zip(torch.nonzero(is_kept)[:, 0].tolist(), (weights / weights.sum())[is_kept].tolist(), strict=True))


def random_params(generator: random.Random) -> SamplingParams:
    """Each option is off about every other time."""

    def maybe(neutral: float, *values: float) -> float:
        return neutral if generator.random() < 0.5 else generator.choice(values)

    order = list(generator.choice([TEMPERATURE_FIRST, TEMPERATURE_LAST]))
    if generator.random() < 0.5:
        order = generator.sample(DISPENSABLE, generator.randrange(len(DISPENSABLE) + 1))
    return SamplingParams(
        temperature=generator.choice([0.3, 1.0, 1.7]),
        top_k=int(maybe(0, 1, 2, 7, 30, 1000)),
        top_p=maybe(1.0, 0.999, 0.9, 0.5, 0.1, 0.0),
        min_p=maybe(0.0, 0.01, 0.3, 1.0),
        typical_p=maybe(1.0, 0.95, 0.6, 0.2, 0.01),
        top_n_sigma=maybe(0.0, 0.3, 1.0, 2.5),
        min_keep=int(maybe(0, 1, 3, 12)),
        xtc_probability=maybe(0.0, 1.0),
        xtc_threshold=generator.choice([0.0, 0.01, 0.1, 0.3, 0.6]),
        dynamic_temperature_range=maybe(0.0, 0.2, 1.5),
        dynamic_temperature_exponent=generator.choice([0.5, 1.0, 2.0]),
        mirostat=int(maybe(0, 0, 0, 1, 2)),
        samplers=tuple(order),
    )


@pytest.mark.law("Truth of the chain")
@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(2, 140),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    decimals=st.sampled_from([0, 1, 6]),
)
def test_the_chain_leaves_what_the_definitions_leave(seed: int, vocab: int, scale: float, decimals: int) -> None:
    generator = random.Random(seed)
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale).round(decimals=decimals)
    if generator.random() < 0.3:
        logits[torch.tensor(generator.sample(range(vocab), vocab // 2))] = -math.inf  # as a constraint would
    params = random_params(generator)
    mu = generator.choice([0.5, 3.0, 10.0])
    if params.mirostat == 1:
        logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale  # its fit divides by zero
    applies = params.xtc_probability == 1.0
    expected = distribution(logits.double().tolist(), params, mu=mu, xtc_applies=applies)
    settled = [outcome(logits, params, count, mu=mu) for count in (1, 5, 20, 101, vocab)]
    assert settled[-1] is not None
    for got in settled:
        if got is not None:
            assert set(got) == {token for token in expected if expected[token] > 0 or token in got}, params
            assert all(got[token] == pytest.approx(expected[token], abs=1e-9) for token in got), params
    full = full_outcome(logits, params, mu=mu)
    assert set(full) == {token for token in expected if expected[token] > 0 or token in full}, params
    assert all(full[token] == pytest.approx(expected[token], abs=1e-9) for token in full), params


def test_tokens_that_have_the_threshold_exactly_are_top_choices() -> None:
    params = SamplingParams(xtc_probability=1.0, xtc_threshold=0.1, temperature=0.3)
    logits = torch.zeros(10)
    assert outcome(logits, params, 10) == {9: 1.0}
    assert full_outcome(logits, params, mu=0.0) == {9: 1.0}


LARGE = 4_000  # of which most stay: far more than are ever sorted
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda noise: noise * 0.05,
    "high and flat": lambda noise: 20.0 + noise * 0.001,
    "equal": lambda noise: noise * 0.0,
    "of few values": lambda noise: (noise * 2).round() / 4,
    "one spike": lambda noise: torch.where(torch.arange(len(noise)) == 7, 4.0, noise * 0.01),
    "tiny": lambda noise: noise * 1e-20,
    "heavy tail": lambda noise: noise / noise.flip(0).abs().clamp(min=0.3) * 0.2,
}
EXTREMES = {
    "top_p": SamplingParams(top_p=0.9),
    "top_k": SamplingParams(top_k=3000),
    "typ_p": SamplingParams(typical_p=0.8),
    "min_p": SamplingParams(min_p=0.1),
    "sigma": SamplingParams(top_n_sigma=2.0),
    "xtc": SamplingParams(xtc_probability=1.0, xtc_threshold=2.1e-4),
    "mirostat 1": SamplingParams(mirostat=1),
    "mirostat 2": SamplingParams(mirostat=2),
    "temperature last": SamplingParams(temperature=0.6, top_p=0.95, typical_p=0.9, samplers=TEMPERATURE_LAST),
    "min_keep": SamplingParams(top_p=0.1, min_p=0.999, typical_p=0.1, min_keep=2700),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EXTREMES)
def test_flat_rows_of_a_large_vocabulary_are_settled_without_comparing_its_tokens(
    name: str, shape: str, dtype: torch.dtype
) -> None:
    noise = torch.randn(LARGE, generator=torch.Generator().manual_seed(len(name + shape)))
    logits, params = SHAPES[shape](noise).to(dtype).float(), EXTREMES[name]
    if params.mirostat == 1 and bool(logits.amin() == logits.amax()):
        logits = (noise * 0.01).to(dtype).float()  # its fit divides by zero
    wanted = LogprobParams(top=LARGE, post_sampling=True)
    sequence = row(params, logprobs=wanted)
    sequence.sampling_state.mu = 14.0
    expected = distribution(logits.double().tolist(), params, mu=14.0, xtc_applies=name == "xtc")
    sorted_sizes: list[int] = []
    with SortedSizes(sorted_sizes):
        (drawn,) = draw_tokens(logits[None], [row(params)])
    assert max(sorted_sizes, default=0) <= NUM_CANDIDATES
    (drawn,) = draw_tokens(logits[None], [sequence])
    assert drawn.probability == pytest.approx(expected[drawn.token_id], rel=1e-6)
    got = {token: math.exp(logprob) for token, logprob in drawn.top}
    assert set(got) == {token for token, probability in expected.items() if probability > 0}
    assert all(got[token] == pytest.approx(expected[token], rel=1e-6) for token in got)


class SortedSizes(TorchDispatchMode):
    """Writes down how many columns each sort of floats sorts; integers are sorted by their digits, in a few passes."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self._sizes = sizes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket is torch.ops.aten.sort and args[0].is_floating_point():
            self._sizes.append(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [
        (0.1, {2, 3}),  # of .5, .3 and .15 only the last stays
        (0.4, {0, 1, 2, 3}),  # one alone is above
        (0.2, {1, 2, 3}),
    ],
)
def test_xtc_keeps_the_least_likely_of_the_top_choices(threshold: float, kept: set[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    params = SamplingParams(xtc_probability=1.0, xtc_threshold=threshold)
    for count in (0, 3, 4):
        got = outcome(logits, params, count)
        assert got is None or set(got) == kept
    assert outcome(logits, params, 4) is not None


@pytest.mark.parametrize("later", ["top_p", "typ_p", "temperature", "xtc"])
def test_what_xtc_took_from_the_top_is_missing_in_the_sums_of_later_stages(later: SamplerName) -> None:
    logits = torch.tensor([0.3, 0.2] + [0.01] * 50).log() + torch.linspace(0.01, 0.0, 52)
    params = SamplingParams(
        top_p=0.5, typical_p=0.5, xtc_probability=1.0, dynamic_temperature_range=0.5, samplers=("xtc", later)
    )
    expected = distribution(logits.double().tolist(), params, xtc_applies=True)
    found = [outcome(logits, params, count) for count in (5, 20, 52)]
    assert found[-1] is not None
    assert all(got is None or got == pytest.approx(expected) for got in found)


def test_xtc_strikes_with_its_probability_and_not_by_the_number_that_draws() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(2000, -1)
    rows = [row(SamplingParams(seed=seed, xtc_probability=0.25)) for seed in range(2000)]
    tokens = [drawn.token_id for drawn in draw_tokens(logits, rows)]
    share = sum(token in (0, 1) for token in tokens) / 2000  # never drawn where it strikes
    assert share == pytest.approx(0.75 * 0.8, abs=0.04)


def test_min_keep_holds_xtc_back() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    params = SamplingParams(xtc_probability=1.0, xtc_threshold=0.1)
    assert len(outcome(logits, replace(params, min_keep=2), 4) or ()) == 2
    assert len(outcome(logits, replace(params, min_keep=3), 4) or ()) == 4


def test_temperature_last_truncates_the_distribution_that_temperature_first_flattens() -> None:
    logits = torch.tensor([0.6, 0.25, 0.1, 0.05]).log()
    params = SamplingParams(temperature=3.0, top_p=0.8)
    first = outcome(logits, params, 4)
    last = outcome(logits, replace(params, samplers=TEMPERATURE_LAST), 4)
    assert first is not None
    assert last is not None
    assert (len(first), len(last)) == (3, 2)
    assert last[0] / last[1] == pytest.approx((0.6 / 0.25) ** (1 / 3))


def test_samplers_left_out_of_the_list_do_nothing() -> None:
    logits = torch.tensor([0.6, 0.25, 0.1, 0.05]).log()
    params = SamplingParams(temperature=3.0, top_k=1, top_p=0.1, samplers=("top_k",))
    assert set(outcome(logits, params, 4) or ()) == {0}
    left = outcome(logits, replace(params, samplers=()), 4)
    assert left is not None
    assert left[0] == pytest.approx(0.6)


def test_dynamic_temperature_is_low_where_the_model_is_sure_and_high_where_it_is_not() -> None:
    params = SamplingParams(temperature=1.0, dynamic_temperature_range=0.5)
    flat = torch.zeros(4)
    sure = torch.tensor([0.0, -50.0, -50.0, -50.0])
    half = torch.tensor([0.0, 0.0, -50.0, -50.0])  # its entropy is ln 2 of at most ln 4
    for count in (0, 4):
        found = []
        for logits in (flat, sure, half):
            left = outcome(logits, params, count)
            assert left is not None
            found.append(left)
        assert found[0] == pytest.approx(dict.fromkeys(range(4), 0.25))
        assert found[1][3] == pytest.approx(math.exp(-50.0 / 0.5), rel=1e-6)
        assert found[2][3] == pytest.approx(0.5 * math.exp(-50.0 / 1.0), rel=1e-6)


def test_equal_logits_leave_those_with_the_lowest_ids() -> None:
    logits = torch.zeros(10)
    assert set(outcome(logits, SamplingParams(top_k=3), 10) or ()) == {0, 1, 2}
    assert set(outcome(logits, SamplingParams(top_p=0.5), 10) or ()) == {0, 1, 2, 3, 4}
    assert outcome(logits, SamplingParams(top_k=3), 5) is None  # five of ten equals prove nothing


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.05, 0.5, 3.0]))
def test_a_draw_from_a_large_vocabulary_reports_the_distribution_of_the_definitions(seed: int, scale: float) -> None:
    """By all ways: 256 candidates, and the whole vocabulary."""
    vocab = 5000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale
    params = random_params(random.Random(seed))
    sequence = row(params, logprobs=LogprobParams(top=vocab, post_sampling=True))
    applies = params.xtc_probability == 1.0
    expected = distribution(logits.double().tolist(), params, mu=10.0, xtc_applies=applies)
    (drawn,) = draw_tokens(logits[None], [sequence])
    assert drawn.probability == pytest.approx(expected[drawn.token_id], rel=1e-6)
    got = {token: math.exp(logprob) for token, logprob in drawn.top}
    assert set(got) == {token for token, probability in expected.items() if probability > 0}
    assert all(got[token] == pytest.approx(expected[token], rel=1e-6) for token in got)


def test_a_chain_of_stages_is_known_by_the_names_that_requests_use() -> None:
    assert {*STAGES, "penalties", "dry"} == {*TEMPERATURE_FIRST, "mirostat_1", "mirostat_2"}
    assert sorted(TEMPERATURE_FIRST) == sorted(TEMPERATURE_LAST)
