"""Constraints in the sampler: drawn is what is allowed, as if there were no other tokens."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch import Tensor

from serve_app.core.request import SamplingParams, StopParams
from serve_app.engine.sampling.draw import Drawn
from serve_app.engine.sampling.masks import StepMasks, is_allowed, restrict, unpacked
from serve_app.engine.sampling.sampler import Sampler
from serve_app.engine.scheduler.sequence import Sequence
from tests.engine.sampling_reference import row

VOCAB = 1000
GREEDY = SamplingParams(temperature=0.0)


def packed(allowed: Tensor) -> Tensor:
    """[rows, vocab] bool -> [rows, words] int32, bit by bit."""
    words = torch.zeros(len(allowed), -(-allowed.shape[1] // 32), dtype=torch.int64)
    for place, token_id in torch.nonzero(allowed).tolist():
        words[place, token_id // 32] |= 1 << (token_id % 32)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def random_masks(rows: int, share: float, seed: int = 0) -> Tensor:
    return torch.rand(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) < share


def masks_of(sequences: dict[int, Sequence], allowed: Tensor) -> StepMasks:
    """Masks of those rows that are named, each the row of `allowed` in its order."""
    done: Future[None] = Future()
    done.set_result(None)
    return StepMasks(packed(allowed), {id(each): place for place, each in enumerate(sequences.values())}, done)


def random_logits(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 255, 1000])
def test_bits_are_unpacked_to_what_was_packed(vocab: int) -> None:
    allowed = torch.rand(3, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.5
    bits = packed(allowed)
    assert torch.equal(unpacked(bits, vocab, torch.device("cpu")), allowed)
    for place in range(3):
        found = [is_allowed(bits[place], token_id) for token_id in range(vocab)]
        assert found == allowed[place].tolist()


def test_restricting_changes_no_logits_that_it_was_given() -> None:
    logits, allowed = random_logits(2), random_masks(2, 0.3)
    logits[0, 5], logits[1, 7] = nan, inf
    allowed[0, 5] = allowed[1, 7] = False
    before = logits.clone()
    restricted = restrict(logits, packed(allowed))
    assert torch.equal(logits.nan_to_num(7.5), before.nan_to_num(7.5))
    assert torch.equal(torch.isinf(restricted), ~allowed)
    assert torch.equal(restricted[allowed], logits[allowed])


@pytest.mark.parametrize("share", [0.002, 0.3, 0.98])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=3),
        SamplingParams(seed=3, top_k=5, temperature=0.7),
        SamplingParams(seed=3, top_p=0.6),
        SamplingParams(seed=3, typical_p=0.5, min_p=0.01),
        SamplingParams(seed=3, mirostat=2),
        SamplingParams(seed=3, top_n_sigma=1.0, xtc_probability=1.0, xtc_threshold=0.01),
    ],
)
def test_a_masked_row_is_drawn_from_as_if_other_tokens_had_no_logit(params: SamplingParams, share: float) -> None:
    """Beside rows that are not constrained, which are drawn from as ever."""
    logits, allowed = random_logits(8), random_masks(4, share)
    allowed[:, 11] = True
    for place in range(4):  # half of the greedy ones are allowed what they like best
        allowed[place, logits[2 * place].argmax()] = place % 2 == 0
    held = logits.clone()
    held[::2] = torch.where(allowed, held[::2], -inf)
    reference = Sampler().choose(held, [row(params) for _ in range(8)])
    sequences = [row(params) for _ in range(8)]
    masks = masks_of({place: sequences[place] for place in (0, 2, 4, 6)}, allowed)
    assert Sampler().choose(logits, sequences, masks) == reference
    drawn = [result.token_id for result in reference if isinstance(result, Drawn)]
    assert all(allowed[place, drawn[2 * place]] for place in range(4))


def test_a_row_that_is_left_nothing_is_exhausted_and_one_that_is_no_number_is_not() -> None:
    logits, allowed = random_logits(4), torch.zeros(4, VOCAB, dtype=torch.bool)
    allowed[:, 3] = True
    logits[1], logits[2, 3] = nan, -inf
    for params in (GREEDY, SamplingParams(seed=1)):
        sequences = [row(params) for _ in range(4)]
        stop = StopParams(token_ids=(3,), min_tokens=5)
        sequences[3].request = replace(sequences[3].request, stop=stop)
        found = Sampler().choose(logits, sequences, masks_of(dict(enumerate(sequences)), allowed))
        assert isinstance(found[0], Drawn)
        assert found[0].token_id == 3
        assert found[1] is None
        assert found[2:] == ["exhausted", "exhausted"]
