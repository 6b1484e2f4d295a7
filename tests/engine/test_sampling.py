"""The sampler against obvious references: full vocabulary, float64, one row at a time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.request import LogprobParams, SamplingParams
from serve_app.engine.sampling.draw import uniform
from serve_app.engine.sampling.logprobs import score
from serve_app.engine.sampling.sampler import draw_tokens
from serve_app.engine.sampling.truncation import Truncation, choose_candidates
from tests.engine.conftest import DEMO
from tests.engine.harness import complete, config, make_engine, request


def reference_kept(logits: list[float], *, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Kept token ids with their renormalised probabilities, straight from the definitions."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    highest = max(logits)
    weights = {token: math.exp(logits[token] - highest) for token in order}
    kept = order[:top_k] if top_k > 0 else list(order)
    if top_p < 1.0:
        mass, nucleus = sum(weights[token] for token in kept), []
        for token in kept:
            nucleus.append(token)
            if sum(weights[t] for t in nucleus) >= top_p * mass:
                break
        kept = nucleus
    kept = [token for token in kept if weights[token] >= min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(2, 60),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    decimals=st.sampled_from([0, 1, 6]),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    num_candidates=st.integers(1, 64),
)
def test_candidates_are_exactly_what_the_definitions_keep(
    seed: int, vocab: int, scale: float, decimals: int, top_k: int, top_p: float, min_p: float, num_candidates: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(1, vocab, generator=generator) * scale).round(decimals=decimals)  # with ties
    truncation = Truncation(
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.tensor([min_p], dtype=torch.float64),
    )
    expected = reference_kept(logits[0].double().tolist(), top_k=top_k, top_p=top_p, min_p=min_p)
    whole = choose_candidates(logits, truncation, vocab)
    assert whole.is_settled.all()
    for found in (whole, choose_candidates(logits, truncation, num_candidates)):
        if not found.is_settled.all():
            continue  # the caller widens these
        kept = found.probabilities[0] > 0
        probabilities = found.probabilities[0][kept] / found.probabilities[0].sum()
        got = dict(zip(found.token_ids[0][kept].tolist(), probabilities.tolist(), strict=True))
        assert set(got) == set(expected)
        assert all(got[token] == pytest.approx(expected[token], abs=1e-6) for token in got)


def fake_sequences(parameters: list[SamplingParams]) -> list[object]:
    class Fake:
        def __init__(self, index: int, sampling: SamplingParams) -> None:
            self.request = request(f"{index}", sampling=sampling)
            self.sample = 0
            self.num_tokens = 10

    return [Fake(index, sampling) for index, sampling in enumerate(parameters)]


def test_a_row_draws_the_same_token_alone_and_in_company() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 5000, generator=generator) * 3
    choices = [
        SamplingParams(seed=i, temperature=0.5 + i / 20, top_k=[0, 3, 300, 0][i % 4], top_p=[1.0, 0.9, 0.99][i % 3],
                       min_p=[0.0, 0.05][i % 2])
        for i in range(40)
    ]  # fmt: skip
    rows = fake_sequences(choices)
    together = draw_tokens(logits, rows)  # type: ignore[arg-type]
    alone = [draw_tokens(logits[i : i + 1], rows[i : i + 1])[0] for i in range(40)]  # type: ignore[arg-type]
    assert together == alone


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(temperature=2.0, top_k=5),
        SamplingParams(temperature=1.0, min_p=0.2),
    ],
)
def test_frequencies_follow_the_truncated_distribution(sampling: SamplingParams) -> None:
    """A chi-squared statistic over 6000 seeds stays under its 99.99 % bound for so many kept tokens."""
    generator = torch.Generator().manual_seed(3)
    row = torch.randn(12, generator=generator)
    expected = reference_kept(
        (row.double() / sampling.temperature).tolist(), top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
    )
    draws = 6000
    seeded = [replace(sampling, seed=seed) for seed in range(draws)]
    tokens = draw_tokens(row.expand(draws, -1), fake_sequences(seeded))  # type: ignore[arg-type]
    counts = Counter(tokens)
    assert set(counts) <= set(expected)
    statistic = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in expected.items())
    assert statistic < 40.0


def test_uniforms_are_flat_and_differ_in_every_counter() -> None:
    numbers = [
        uniform(seed, prompt_index=prompt, sample=sample, position=position)
        for seed in (0, 1, 2**63)
        for prompt in range(4)
        for sample in range(4)
        for position in range(100)
    ]
    assert len(set(numbers)) == len(numbers)
    tenths = Counter(int(number * 10) for number in numbers)
    assert all(abs(tenths[i] - 480) < 110 for i in range(10))


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    scored = score(logits, [4, 7, 49], 3)
    for row, entry in enumerate(scored):
        exact = logits[row].double() - torch.logsumexp(logits[row].double(), dim=-1)
        assert entry.logprob == pytest.approx(float(exact[entry.token_id]), abs=1e-5)
        best = torch.argsort(exact, descending=True)[:3].tolist()
        assert [token for token, _ in entry.top] == best


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
