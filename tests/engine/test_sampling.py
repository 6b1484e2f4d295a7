"""Draws: reproducible, independent of company, distributed as the definitions say; and what is reported of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from serve_app.core.delta import TokenLogprob
from serve_app.core.request import (
    TEMPERATURE_FIRST,
    TEMPERATURE_LAST,
    DryParams,
    LogprobParams,
    SamplingParams,
    StopParams,
)
from serve_app.engine.sampling.draw import draw_tokens
from serve_app.engine.sampling.noise import Stream, gumbel, key, keys_tensor, pick, uniform
from serve_app.engine.sampling.sampler import Sampler, score
from serve_app.engine.scheduler.sequence import Sequence
from tests.engine.conftest import DEMO
from tests.engine.harness import complete, config, make_engine, request
from tests.engine.sampling_reference import distribution, row

pytestmark = pytest.mark.slow


def mixed_params(index: int) -> SamplingParams:
    """Another mix of options for every index."""
    return SamplingParams(
        seed=index,
        temperature=0.5 + index / 20,
        top_k=[0, 3, 300, 0, 0][index % 5],
        top_p=[1.0, 0.9, 0.99][index % 3],
        min_p=[0.0, 0.05][index % 2],
        typical_p=[1.0, 1.0, 1.0, 0.7][index % 4],
        top_n_sigma=[0.0, 0.0, 2.0][index % 3],
        xtc_probability=[0.0, 0.5, 1.0, 0.0][index % 4],
        dynamic_temperature_range=[0.0, 0.0, 0.0, 0.3, 0.0][index % 5],
        samplers=[TEMPERATURE_FIRST, TEMPERATURE_LAST, ("xtc", "top_p", "temperature")][index % 3],
        mirostat=[0, 0, 0, 0, 0, 1, 2][index % 7],
        repetition_penalty=[1.0, 1.2][index % 2],
        frequency_penalty=[0.0, 0.0, 0.4][index % 3],
        penalty_window=[None, 5][index % 2],
        logit_bias=[(), ((11, -math.inf), (12, 2.0))][index % 2],
        dry=[None, None, DryParams(multiplier=0.8, breakers=((3,),))][index % 3],
    )


def mixed_rows(count: int) -> list[Sequence]:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    stop = StopParams(min_tokens=9)
    return [
        row(mixed_params(i), prompt=tokens, output=tokens[: i % 7], stop=stop if i % 2 else None) for i in range(count)
    ]


@pytest.mark.law("Determinism")
def test_a_row_draws_the_same_token_alone_and_in_company() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(60, 5000, generator=generator) * 3
    sampler = Sampler(eos_token_ids=frozenset([7]))
    together = sampler.choose(logits, mixed_rows(60))
    rows = mixed_rows(60)
    alone = [sampler.choose(logits[i : i + 1], rows[i : i + 1])[0] for i in range(60)]
    assert together == alone
    assert len({one.token_id for one in together if one is not None}) > 20


def test_mixed_rows_of_one_seed_draw_the_same_tokens_again() -> None:
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(2))
    assert Sampler().choose(logits, mixed_rows(40)) == Sampler().choose(logits, mixed_rows(40))


@pytest.mark.law("Truth of the chain")
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(temperature=2.0, top_k=5),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.0, typical_p=0.6),
        SamplingParams(temperature=1.5, dynamic_temperature_range=0.5),
        SamplingParams(temperature=1.0, mirostat=2, mirostat_tau=1.5),
    ],
)
def test_frequencies_follow_the_truncated_distribution(sampling: SamplingParams) -> None:
    """A chi-squared statistic over 4000 seeds stays under its 99.99 % bound for so many kept tokens."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3))
    expected = distribution(logits.double().tolist(), sampling, mu=2 * sampling.mirostat_tau)
    draws = 4000
    seeded = [row(replace(sampling, seed=seed)) for seed in range(draws)]
    counts = Counter(drawn.token_id for drawn in draw_tokens(logits.expand(draws, -1), seeded))
    assert set(counts) <= set(expected)
    statistic = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in expected.items())
    assert statistic < 40.0


CPU = torch.device("cpu")


def key_of(seed: int) -> int:
    return key(seed, prompt_index=0, sample=0, position=0)


@pytest.mark.law("Determinism")
def test_uniforms_are_flat_and_differ_in_every_counter() -> None:
    numbers = [
        uniform(seed, prompt_index=prompt, sample=sample, position=position, stream=stream)
        for seed in (0, 1, 2**63)
        for prompt in range(4)
        for sample in range(4)
        for position in range(100)
        for stream in Stream
    ]
    assert len(set(numbers)) == len(numbers)
    tenths = Counter(int(number * 10) for number in numbers)
    assert all(abs(tenths[i] - 1440) < 190 for i in range(10))


def test_a_token_of_no_weight_is_never_picked() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64).expand(4000, -1)
    picked = Counter(pick(weights, torch.arange(5), keys_tensor([key_of(seed) for seed in range(4000)], CPU)).tolist())
    assert set(picked) == {1, 3}
    assert abs(picked[3] - 3000) < 150


def test_noise_is_the_same_wherever_a_token_stands_and_follows_gumbels_law() -> None:
    keys = keys_tensor([key_of(seed) for seed in (0, 1, 2**63, 2**64 - 1)], CPU)
    ids = torch.arange(20000)
    noise = gumbel(keys, ids)
    assert torch.equal(gumbel(keys, ids.flip(0)), noise.flip(1))
    assert torch.isfinite(noise).all()
    for threshold in (-1.0, 0.0, 1.0, 3.0):
        share = (noise < threshold).double().mean(dim=1)
        expected = math.exp(-math.exp(-threshold))
        assert ((share - expected).abs() < 0.015).all()


def test_draws_survive_the_rounding_noise_that_company_brings() -> None:
    """Of 2000 draws over 2048 tokens, none changes when every logit moves by up to a millionth."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(200, 2048, generator=generator) * 2
    noisy = logits + (torch.rand(logits.shape, generator=generator) - 0.5) * 2e-6
    rows = [row(SamplingParams(temperature=1.5, top_p=[1.0, 0.95][i % 2], seed=i)) for i in range(2000)]
    for first in range(0, 2000, 200):
        block = rows[first : first + 200]
        before, after = draw_tokens(logits, block), draw_tokens(noisy, block)
        assert [drawn.token_id for drawn in before] == [drawn.token_id for drawn in after]


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    scored = score(logits, [4, 7, 49], 3)
    for raw, entry in zip(logits.double(), scored, strict=True):
        exact = raw - torch.logsumexp(raw, dim=-1)
        assert entry.logprob == pytest.approx(float(exact[entry.token_id]), abs=1e-5)
        best = torch.argsort(exact, descending=True)[:3].tolist()
        assert [token for token, _ in entry.top] == best


@pytest.mark.law("Determinism")
def test_a_seed_reproduces_and_samples_of_one_request_differ() -> None:
    engine = make_engine(config(DEMO))
    prompt = list(range(40, 60))
    sampling = SamplingParams(temperature=1.5, seed=42)
    first = complete(engine, [(request("a", sampling=sampling, n=3, max_tokens=24), prompt)])
    crowd = [(request(f"x{i}", sampling=SamplingParams(temperature=1.0, seed=i)), prompt[:i]) for i in range(1, 9)]
    second = complete(engine, [*crowd, (request("a", sampling=sampling, n=3, max_tokens=24), prompt)])
    assert [first["a", j].token_ids for j in range(3)] == [second["a", j].token_ids for j in range(3)]
    assert len({tuple(first["a", j].token_ids) for j in range(3)}) == 3


def test_scoring_a_generated_text_gives_the_logprobs_that_generation_gave() -> None:
    engine = make_engine(config(DEMO))
    prompt = list(range(40, 75))
    sampling = SamplingParams(temperature=1.0, seed=5)
    made = complete(
        engine, [(request("made", sampling=sampling, max_tokens=30, logprobs=LogprobParams(top=2)), prompt)]
    )["made", 0]
    generated = list(made.logprobs)
    whole = prompt + [entry.token_id for entry in generated]  # type: ignore[attr-defined]
    scored = complete(engine, [(request("scored", max_tokens=0, logprobs=LogprobParams(top=2, prompt=True)), whole)])[
        "scored", 0
    ]
    report = scored.deltas[0].prompt
    assert report is not None
    assert report.logprobs is not None
    assert report.logprobs[0].logprob is None
    assert len(report.logprobs) == len(whole)
    for entry, again in zip(generated, report.logprobs[len(prompt) :], strict=True):
        assert entry.token_id == again.token_id  # type: ignore[attr-defined]
        assert entry.logprob == pytest.approx(again.logprob, abs=1e-4)  # type: ignore[attr-defined]
    assert scored.deltas[-1].finish is not None
    assert scored.deltas[-1].finish.num_tokens == 0


def test_post_sampling_logprobs_are_of_what_the_chain_left() -> None:
    engine = make_engine(config(DEMO))
    prompt = list(range(40, 60))
    sampling = SamplingParams(temperature=0.8, top_k=3, seed=11)

    def logprobs(params: SamplingParams, *, post_sampling: bool) -> list[TokenLogprob]:
        wanted = LogprobParams(top=5, post_sampling=post_sampling)
        made = complete(engine, [(request("a", sampling=params, max_tokens=8, logprobs=wanted), prompt)])["a", 0]
        return made.logprobs  # type: ignore[return-value]

    raw = logprobs(sampling, post_sampling=False)
    post = logprobs(sampling, post_sampling=True)
    assert [entry.token_id for entry in raw] == [entry.token_id for entry in post]
    for before, after in zip(raw, post, strict=True):
        assert (len(before.top), len(after.top)) == (5, 3)
        assert sum(math.exp(entry.logprob) for entry in after.top) == pytest.approx(1.0)
        weights = [math.exp(entry.logprob / 0.8) for entry in before.top[:3]]
        expected = [weight / sum(weights) for weight in weights]
        assert [math.exp(entry.logprob) for entry in after.top] == pytest.approx(expected, rel=1e-4)
        assert after.logprob in [entry.logprob for entry in after.top]
    greedy = logprobs(SamplingParams(temperature=0.0), post_sampling=True)
    assert all(entry.logprob == 0.0 and len(entry.top) == 1 for entry in greedy)


def test_mixed_requests_say_the_same_alone_and_in_a_crowd_that_is_preempted() -> None:
    asked = [(request(f"r{i}", sampling=mixed_params(i), max_tokens=40), list(range(40, 56 + i))) for i in range(8)]
    tight = make_engine(config(DEMO, kv_cache_bytes=12 * 6 * 2 * (32 + 32) * 4 * 16), eos_token_ids=frozenset())
    crowded = complete(tight, asked)
    assert tight.num_preemptions > 0
    roomy = make_engine(config(DEMO), eos_token_ids=frozenset())
    for one, prompt in asked:
        alone = complete(roomy, [(one, prompt)])[one.request_id, 0]
        assert crowded[one.request_id, 0].token_ids == alone.token_ids, one.request_id
