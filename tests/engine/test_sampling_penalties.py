"""Bias and penalties: their formulas, the tokens they see, and counts that grow with a sequence."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.request import DryParams, SamplingParams, StopParams
from serve_app.engine.sampling.draw import Drawn
from serve_app.engine.sampling.edits import edit_logits
from serve_app.engine.sampling.sampler import Sampler
from serve_app.engine.sampling.state import TokenCounts
from tests.engine.sampling_reference import edited, row

pytestmark = pytest.mark.slow

NO_EOS = frozenset[int]()
LOGITS = [2.0, -2.0, 0.0, 1.0, 3.0, -1.0]


def edit(params: SamplingParams, *, prompt: list[int], output: list[int]) -> list[float]:
    sequence = row(params, prompt=prompt, output=output)
    return edit_logits(torch.tensor([LOGITS]), [sequence], NO_EOS)[0].tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [  # prompt 0 1 0, output 4 5 4
        (SamplingParams(repetition_penalty=2.0), [1.0, -4.0, 0.0, 1.0, 1.5, -2.0]),
        (SamplingParams(repetition_penalty=2.0, repetition_sees_prompt=False), [2.0, -2.0, 0.0, 1.0, 1.5, -2.0]),
        (SamplingParams(presence_penalty=0.5), [2.0, -2.0, 0.0, 1.0, 2.5, -1.5]),
        (SamplingParams(frequency_penalty=0.5), [2.0, -2.0, 0.0, 1.0, 2.0, -1.5]),
        (SamplingParams(presence_penalty=0.25, frequency_penalty=0.5), [2.0, -2.0, 0.0, 1.0, 1.75, -1.75]),
        (SamplingParams(frequency_penalty=0.5, penalty_window=4), [1.5, -2.0, 0.0, 1.0, 2.0, -1.5]),
        (SamplingParams(repetition_penalty=2.0, penalty_window=1), [2.0, -2.0, 0.0, 1.0, 1.5, -1.0]),
        (SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, penalty_window=0), LOGITS),
        (SamplingParams(repetition_penalty=2.0, presence_penalty=1.0), [1.0, -4.0, 0.0, 1.0, 0.5, -3.0]),
        (SamplingParams(logit_bias=((2, 5.0), (3, -1.0), (3, -1.0))), [2.0, -2.0, 5.0, -1.0, 3.0, -1.0]),
        (SamplingParams(logit_bias=((0, -math.inf), (1, 4.0))), [-math.inf, 2.0, 0.0, 1.0, 3.0, -1.0]),
        # bias comes first: what it lifts above zero is divided
        (SamplingParams(logit_bias=((1, 4.0),), repetition_penalty=2.0), [1.0, 1.0, 0.0, 1.0, 1.5, -2.0]),
    ],
)
def test_each_penalty_follows_its_formula_on_the_tokens_it_sees(params: SamplingParams, expected: list[float]) -> None:
    assert edit(params, prompt=[0, 1, 0], output=[4, 5, 4]) == pytest.approx(expected)
    assert edited(LOGITS, [0, 1, 0], [4, 5, 4], params) == pytest.approx(expected)


def test_penalties_left_out_of_the_samplers_are_off() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, dry=DryParams(multiplier=1.0))
    assert edit(replace(params, samplers=("top_k",)), prompt=[0, 1, 0, 1], output=[0, 1]) == LOGITS


def test_without_output_presence_and_frequency_see_nothing_unless_a_window_is_given() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    assert edit(params, prompt=[0, 0, 1], output=[]) == LOGITS
    windowed = edit(replace(params, penalty_window=64), prompt=[0, 0, 1], output=[])
    assert windowed == pytest.approx([-1.0, -4.0, 0.0, 1.0, 3.0, -1.0])


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_edits_of_a_growing_sequence_are_those_of_its_tokens(seed: int) -> None:
    generator = random.Random(seed)
    vocab = generator.choice([3, 8, 30])
    params = SamplingParams(
        repetition_penalty=generator.choice([1.0, 1.3, 0.7]),
        presence_penalty=generator.choice([0.0, 0.5, -1.0]),
        frequency_penalty=generator.choice([0.0, 0.25, -0.5]),
        penalty_window=generator.choice([None, None, 0, 1, 3, 10, 1000]),
        repetition_sees_prompt=generator.random() < 0.5,
        logit_bias=tuple((generator.randrange(vocab), generator.uniform(-3, 3)) for _ in range(3)),
        dry=generator.choice([None, DryParams(multiplier=0.5, base=1.3, allowed_length=1)]),
    )
    prompt = [generator.randrange(vocab) for _ in range(generator.randrange(1, 20))]
    sequence = row(params, prompt=prompt)
    for _ in range(12):
        logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
        before = logits.clone()
        got = edit_logits(logits, [sequence], NO_EOS)[0].double().tolist()
        assert torch.equal(logits, before)  # raw log-probabilities are taken of them
        output = sequence.token_ids[len(prompt) :]
        assert got == pytest.approx(edited(logits[0].double().tolist(), prompt, output, params), abs=1e-4)
        for _ in range(generator.randrange(1, 3)):
            sequence.token_ids.append(generator.randrange(vocab))


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 5), max_size=40), window=st.sampled_from([None, 0, 1, 4]), begin=st.integers(0, 8)
)
def test_counts_kept_token_by_token_are_those_of_a_recount(tokens: list[int], window: int | None, begin: int) -> None:
    counts = TokenCounts(begin=min(begin, len(tokens)), window=window)
    for end in range(min(begin, len(tokens)), len(tokens) + 1):
        counts.catch_up(tokens[:end])
        seen = tokens[min(begin, len(tokens)) : end]
        seen = seen if window is None else seen[max(0, len(seen) - window) :]
        assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == Counter(seen)


class CountedSlices(list[int]):
    """A list that counts the items it gives in slices."""

    num_given = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def, override]
        found = super().__getitem__(place)
        self.num_given += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.parametrize("window", [None, 50_000])
def test_a_step_counts_what_it_adds_and_not_the_prompt_again(window: int | None) -> None:
    tokens = CountedSlices(place % 3000 for place in range(100_000))
    counts = TokenCounts(window=window)
    counts.catch_up(tokens)
    tokens.num_given = 0
    for token_id in range(100):
        tokens.append(token_id)
        counts.catch_up(tokens)
    assert tokens.num_given <= 200
    assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == Counter(
        tokens[-(window or 0) :]
    )


def test_greedy_rows_choose_the_highest_edited_logit() -> None:
    greedy = SamplingParams(temperature=0.0)
    rows = [
        row(greedy),
        row(replace(greedy, logit_bias=((4, -100.0),))),
        row(replace(greedy, presence_penalty=2.5), output=[4]),
        row(replace(greedy, logit_bias=((1, 100.0),), top_k=3, xtc_probability=1.0, mirostat=2)),
    ]
    drawn = Sampler().choose(torch.tensor([LOGITS]).expand(4, -1), rows)
    assert [one.token_id if one else None for one in drawn] == [4, 0, 0, 1]


def test_ids_beyond_the_vocabulary_touch_no_other_row() -> None:
    params = SamplingParams(logit_bias=((6, 5.0), (-1, 5.0), (2, 1.0)))
    rows = [row(params, stop=StopParams(min_tokens=3, token_ids=(7,))), row(SamplingParams())]
    got = edit_logits(torch.tensor([LOGITS, LOGITS]), rows, NO_EOS).tolist()
    assert got == [[2.0, -2.0, 1.0, 1.0, 3.0, -1.0], LOGITS]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_with_a_logit_that_is_no_number_gives_none(value: float) -> None:
    poisoned = torch.tensor([LOGITS, LOGITS])
    poisoned[0, 3] = value
    greedy, drawn = row(SamplingParams(temperature=0.0)), row(SamplingParams())
    assert [one is None for one in Sampler().choose(poisoned, [greedy, drawn])] == [True, False]
    assert [one is None for one in Sampler().choose(poisoned, [drawn, greedy])] == [True, False]


def test_rows_without_edits_are_not_copied() -> None:
    logits = torch.tensor([LOGITS])
    assert edit_logits(logits, [row(SamplingParams(temperature=0.0))], frozenset([3])) is logits


def test_a_row_whose_every_token_is_banned_is_exhausted_and_harms_no_other() -> None:
    banned = SamplingParams(logit_bias=tuple((token, -math.inf) for token in range(6)))
    drawn = Sampler().choose(torch.tensor([LOGITS, LOGITS]), [row(banned), row(SamplingParams(temperature=0.0))])
    assert drawn[0] == "exhausted"
    assert isinstance(drawn[1], Drawn)
    assert drawn[1].token_id == 4


@pytest.mark.parametrize(
    ("stop", "banned"),
    [
        (StopParams(min_tokens=2), {3}),
        (StopParams(min_tokens=2, token_ids=(4, 5)), {3, 4, 5}),
        (StopParams(min_tokens=2, token_ids=(4,), ignore_eos=True), {4}),
        (StopParams(min_tokens=1, token_ids=(4,)), set()),
        (StopParams(token_ids=(4,)), set()),
    ],
)
def test_what_would_end_a_sequence_too_early_is_out_of_play(stop: StopParams, banned: set[int]) -> None:
    sequence = row(SamplingParams(), output=[1], stop=stop)
    got = edit_logits(torch.tensor([LOGITS]), [sequence], frozenset([3]))[0]
    assert {token for token in range(6) if got[token] == -math.inf} == banned
