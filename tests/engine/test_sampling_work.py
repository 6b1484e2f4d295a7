"""What a draw costs: memory that is used again, and as many passes over the vocabulary on any logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from serve_app.core.request import SamplingParams
from serve_app.engine.sampling.candidates import likeliest, sorted_largest
from serve_app.engine.sampling.draw import draw_tokens
from serve_app.engine.sampling.sampler import Sampler, score
from tests.engine.sampling_reference import row

pytestmark = pytest.mark.slow

VOCAB = 150_000
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "peaked": lambda noise: noise * 3.0,
    "flat": lambda noise: noise * 0.05,
    "equal": lambda noise: noise * 0.0,
    "of few values": lambda noise: (noise * 2).round(),
    "one spike": lambda noise: torch.where(torch.arange(VOCAB) == 7, 9.0, noise * 0.05),
    "tiny": lambda noise: noise * 1e-30,
}
SETTINGS = {
    "plain": SamplingParams(),
    "top_p": SamplingParams(top_p=0.9),
    "top_k": SamplingParams(top_k=5000),
    "top_k, top_p, min_p": SamplingParams(top_k=5000, top_p=0.95, min_p=0.01, temperature=1.3),
    "min_p": SamplingParams(min_p=0.3),
}

MOST_PASSES = {"plain": 12, "top_p": 40, "top_k": 40}


class Work(TorchDispatchMode):
    """Writes down the size of the largest tensor that is made, and counts operations on so many numbers or more."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.largest_made = 0
        self.num_passes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        given = [value for value in args if isinstance(value, Tensor)]
        self.num_passes += any(value.numel() >= self._size for value in given)
        if isinstance(result, Tensor) and not func._schema.is_mutable:
            self.largest_made = max(self.largest_made, result.numel())
        return result


def logits_of(shape: str) -> Tensor:
    return SHAPES[shape](torch.randn(VOCAB, generator=torch.Generator().manual_seed(len(shape))))


def work_of(params: SamplingParams, shape: str) -> Work:
    """Of a draw from such logits."""
    logits = logits_of(shape)[None]
    with Work(VOCAB // 2) as work:
        Sampler().choose(logits, [row(params)])
    return work


@pytest.mark.law("Bounded work")
@pytest.mark.parametrize("name", SETTINGS)
def test_no_logits_take_more_than_so_many_passes_over_the_vocabulary(name: str) -> None:
    assert all(0 < work_of(SETTINGS[name], shape).num_passes <= MOST_PASSES.get(name, 70) for shape in SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_tokens_of_a_row_are_sorted_as_by_comparing_them(shape: str, dtype: torch.dtype) -> None:
    logits = logits_of(shape).to(dtype).float()
    logits[5], logits[6], logits[9], logits[11] = 0.0, -0.0, -torch.inf, 3e-39
    expected = torch.sort(logits, descending=True, stable=True)
    values, token_ids = sorted_largest(logits[None], VOCAB)
    assert torch.equal(token_ids[0], expected.indices)
    assert torch.equal(values[0], expected.values)


def test_a_row_that_is_no_number_leaves_the_draws_of_its_neighbours_as_they_are() -> None:
    logits = torch.stack([logits_of(shape) for shape in SHAPES])
    spoilt = logits.clone()
    spoilt[1], spoilt[3] = -torch.inf, torch.nan
    params = SETTINGS["top_p"]
    rows = [[row(replace(params, seed=seed)) for seed in range(len(SHAPES))] for _ in range(2)]
    whole, some = Sampler().choose(logits, rows[0]), Sampler().choose(spoilt, rows[1])
    assert some == [None if place in (1, 3) else drawn for place, drawn in enumerate(whole)]


@pytest.mark.parametrize("num_top", [0, 5])
def test_scores_are_those_of_a_softmax_in_the_memory_of_one_row(num_top: int) -> None:
    logits = torch.stack([logits_of(shape) for shape in ("peaked", "flat", "one spike")])
    targets = [7, 8, 9]
    expected = torch.log_softmax(logits.double(), dim=-1)
    with Work(VOCAB) as work:
        scored = score(logits, targets, num_top)
    assert work.largest_made <= VOCAB
    for one, target, logprobs in zip(scored, targets, expected, strict=True):
        values, ids = torch.topk(logprobs, num_top)
        assert one.logprob == pytest.approx(float(logprobs[target]), abs=2e-6)
        assert [token_id for token_id, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=2e-6)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 259, 1000])
def test_the_likeliest_token_is_that_of_a_plain_search(vocab: int) -> None:
    """Among them rows with ties, with nothing allowed, with infinities, and with what is no number."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40, vocab, generator=generator)
    logits[:10] = logits[:10].round()
    logits[10:13, torch.rand(vocab, generator=generator) < 0.5] = -torch.inf
    logits[13] = -torch.inf
    logits[14] = 0.0
    logits[15, vocab // 2 :] = torch.inf
    logits[16:20, vocab // 3] = torch.nan
    logits[17, vocab - 1] = torch.nan
    assert torch.equal(likeliest(logits), torch.argmax(logits, dim=-1))


@pytest.mark.parametrize("num_top", [0, 5])
def test_rows_that_are_scored_together_are_scored_as_each_alone(num_top: int) -> None:
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(7)) * 5
    targets = list(range(0, 700, 100))
    together = score(logits, targets, num_top)
    alone = [score(logits[row : row + 1], [target], num_top)[0] for row, target in enumerate(targets)]
    assert together == alone
    expected = torch.log_softmax(logits.double(), dim=-1)[range(7), targets]
    torch.testing.assert_close(torch.tensor([each.logprob for each in together]).double(), expected, atol=1e-6, rtol=0)


def test_scores_of_many_rows_are_those_of_a_softmax() -> None:
    logits, targets = torch.randn(150, 5000, generator=torch.Generator().manual_seed(1)) * 3.0, list(range(150))
    scored = score(logits, targets, 3)
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert all(each.logprob == pytest.approx(float(expected[at, at]), abs=1e-6) for at, each in enumerate(scored))
    assert [each.logprob for each in score(logits[140:], targets[140:], 0)] == [each.logprob for each in scored[140:]]


@pytest.mark.parametrize("vocab", [300, 4096])
def test_plain_rows_draw_the_same_together_and_alone(vocab: int) -> None:
    logits = (torch.randn(40, vocab, generator=torch.Generator().manual_seed(0))).bfloat16().float()
    rows = [row(SamplingParams(temperature=0.7, seed=seed)) for seed in range(40)]
    together = draw_tokens(logits, rows)
    assert together == [draw_tokens(logits[at : at + 1], [each])[0] for at, each in enumerate(rows)]
