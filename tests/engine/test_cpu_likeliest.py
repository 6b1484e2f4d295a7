"""The likeliest token of a row of bfloat16 is torch's, whatever the row holds, and steps stay narrow only for that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from serve_app.core.request import LogprobParams, SamplingParams
from serve_app.engine.cpu import compiling
from serve_app.engine.cpu.likeliest import Likeliest, likeliest_kernel
from serve_app.engine.decoder.openmp import libgomp
from serve_app.engine.sampling.sampler import Sampler, widened
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span
from tests.engine.sampling_reference import row

pytestmark = [pytest.mark.slow, pytest.mark.skipif(libgomp() is None, reason="needs torch's libgomp")]

GREEDY = SamplingParams(temperature=0.0)


def found() -> Likeliest:
    made = likeliest_kernel()
    assert made is not None
    return made


def bits(rows: int, vocab: int, seed: int) -> Tensor:
    """Any bits at all: what is no number, of either sign, infinities, both zeros."""
    drawn = torch.randint(-(1 << 15), 1 << 15, (rows, vocab), generator=torch.Generator().manual_seed(seed))
    return drawn.to(torch.int16)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_torchs_whatever_the_bits_are(seed: int) -> None:
    for vocab in (1, 2, 31, 32, 511, 512, 513, 1100, 33_001):
        wild = bits(3, vocab, seed)
        tame = wild.clone()
        tame[(tame & 0x7FFF) > 0x7F80] = 5  # all numbers
        for each in (wild, tame):
            logits = each.view(torch.bfloat16)
            assert found()(logits).tolist() == torch.argmax(logits.float(), dim=-1).tolist(), f"{vocab} of seed {seed}"


@pytest.mark.parametrize(
    "values",
    [
        [0.0, -0.0],
        [-0.0, 0.0],
        [-1.0, -0.0, 0.0],
        [3.0, 3.0, 2.0],
        [-torch.inf, -torch.inf],
        [torch.inf, torch.nan],
        [1.0, -torch.nan, torch.nan],
    ],
)
def test_of_equals_it_is_the_first(values: list[float]) -> None:
    for before in (0, 40, 600, 1500):
        logits = torch.full((1, before + len(values) + 700), -torch.inf)
        logits[0, before : before + len(values)] = torch.tensor(values)
        narrow = logits.bfloat16()
        assert found()(narrow).tolist() == torch.argmax(narrow.float(), dim=-1).tolist()


@pytest.mark.parametrize("width", [8, 16])
def test_rows_are_found_by_many_threads_and_in_strides(width: int) -> None:
    if width > compiling.Machine.here().width:
        pytest.skip("this machine has no such vectors")
    from serve_app.engine.cpu import likeliest_kernel as of

    kernel = Likeliest(compiling.compiled(of.emit, width=width), of.LIKELIEST)
    wide = torch.randn(40, 33_001, generator=torch.Generator().manual_seed(1)).bfloat16()
    part = wide[:, 100:32_900]
    assert kernel(part).tolist() == torch.argmax(part.float(), dim=-1).tolist()


def test_greedy_rows_are_drawn_the_same_from_either() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(2)).bfloat16()
    logits[3] = torch.nan
    logits[4] = -torch.inf
    for sampling in (GREEDY, replace(GREEDY, repetition_penalty=1.3), replace(GREEDY, logit_bias=((9, 50.0),))):
        drawn = [
            Sampler().choose(each, [row(sampling, sample=at) for at in range(6)]) for each in (logits, logits.float())
        ]
        assert drawn[0] == drawn[1]
        assert drawn[0][3] is None


def batch_of(*sequences: Sequence, **changes: object) -> Batch:
    return Batch(tuple(replace(Span(each, 0, 1, samples=True), **changes) for each in sequences))  # type: ignore[arg-type]


def test_logits_stay_narrow_only_where_the_likeliest_is_all_that_is_wanted() -> None:
    logits = torch.zeros(2, 64, dtype=torch.bfloat16)
    greedy, drawn = row(GREEDY), row(SamplingParams(temperature=0.7))
    scored = row(GREEDY, logprobs=LogprobParams(top=1))
    assert widened(logits, batch_of(greedy, greedy)) is logits
    assert widened(logits, batch_of(greedy, drawn, samples=False)) is logits
    for batch in (
        batch_of(greedy, drawn),
        batch_of(scored),
        batch_of(greedy, draft=(1,)),
        batch_of(greedy, scores=1),
    ):
        assert widened(logits, batch).dtype == torch.float32
    assert widened(logits.half(), batch_of(greedy)).dtype == torch.float32
    wide = logits.float()
    assert widened(wide, batch_of(greedy)) is wide
