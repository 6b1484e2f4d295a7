"""Mirostat: its bound follows the surprise of what was drawn, and belongs to the sequence."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch

from serve_app.core.request import LogprobParams, SamplingParams
from serve_app.engine.sampling.sampler import Sampler
from serve_app.engine.sampling.stages import next_mu
from tests.engine.conftest import DEMO
from tests.engine.harness import complete, config, make_engine, request, sequences
from tests.engine.sampling_reference import distribution, row

pytestmark = pytest.mark.slow


def test_the_bound_begins_at_twice_the_target_and_moves_against_the_error() -> None:
    sequence = row(SamplingParams(mirostat=2, mirostat_tau=3.0, mirostat_eta=0.5))
    assert sequence.sampling_state.mu == 6.0
    assert next_mu(6.0, 0.25, tau=3.0, eta=0.5) == pytest.approx(6.5)  # 2 bits where 3 were wanted
    assert next_mu(6.0, 2**-5, tau=3.0, eta=0.5) == pytest.approx(5.0)


@pytest.mark.parametrize("version", [1, 2])
def test_a_draw_is_of_the_kept_set_and_its_renormalised_surprise_moves_the_bound(version: int) -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(version)) * 2
    params = SamplingParams(
        mirostat=version, mirostat_tau=4.0, mirostat_eta=0.3, temperature=1.3, top_k=1, min_p=0.9, seed=7
    )
    sequence = row(params)
    for _ in range(20):
        before = sequence.sampling_state.mu
        expected = distribution(logits.double().tolist(), params, mu=before)
        assert len(expected) > 1  # top_k and min_p have no say
        (drawn,) = Sampler().choose(logits[None], [sequence])
        assert drawn is not None
        assert drawn.probability == pytest.approx(expected[drawn.token_id], rel=1e-6)
        error = -math.log2(drawn.probability) - 4.0
        assert sequence.sampling_state.mu == pytest.approx(before - 0.3 * error)
        sequence.token_ids.append(drawn.token_id)


def test_the_surprise_of_a_long_text_comes_near_the_target() -> None:
    params = SamplingParams(mirostat=2, mirostat_tau=3.0, mirostat_eta=0.2, seed=3)
    sequence = row(params)
    surprises = []
    for step in range(400):
        logits = torch.randn(1, 2000, generator=torch.Generator().manual_seed(step)) * 2
        (drawn,) = Sampler().choose(logits, [sequence])
        assert drawn is not None
        sequence.token_ids.append(drawn.token_id)
        surprises.append(-math.log2(drawn.probability))
    assert statistics.mean(surprises[100:]) == pytest.approx(3.0, abs=0.15)


def test_at_temperature_zero_it_is_greedy_and_the_bound_rests() -> None:
    sequence = row(SamplingParams(mirostat=2, temperature=0.0))
    (drawn,) = Sampler().choose(torch.tensor([[0.0, 2.0, 1.9]]), [sequence])
    assert drawn is not None
    assert (drawn.token_id, drawn.probability) == (1, 1.0)
    assert sequence.sampling_state.mu == 10.0


def test_preemption_does_not_move_the_bound() -> None:
    def asked(name: int) -> tuple[object, list[int]]:
        sampling = SamplingParams(mirostat=1 + name % 2, mirostat_tau=2.0, seed=name)
        wanted = request(f"r{name}", sampling=sampling, max_tokens=60, logprobs=LogprobParams(post_sampling=True))
        endless = replace(wanted, stop=replace(wanted.stop, ignore_eos=True))
        return endless, list(range(40, 60 + name))

    everyone = [asked(name) for name in range(4)]
    tight = make_engine(config(DEMO, kv_cache_bytes=12 * 6 * 2 * (32 + 32) * 4 * 16, prefix_cache=False))
    crowded = complete(tight, everyone)  # type: ignore[arg-type]
    assert tight.num_preemptions > 0
    alone = make_engine(config(DEMO))
    for one, prompt in everyone:
        (sequence,) = sequences(alone, one, prompt)  # type: ignore[arg-type]
        expected = complete(alone, [(one, prompt)])[sequence.request.request_id, 0]  # type: ignore[list-item]
        assert crowded[sequence.request.request_id, 0].token_ids == expected.token_ids
