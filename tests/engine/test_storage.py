"""Queries that attend together: few calls, little padding, and what is attended to is the same."""

from __future__ import annotations

import pytest
import torch

from serve_app.engine.kv.storage import CALL_POSITIONS, Reading, attend, runs


def singles(lengths: list[int]) -> list[Reading]:
    return [
        Reading(first_token=number, place=number, blocks=(), start=length - 1, length=1)
        for number, length in enumerate(sorted(lengths))
    ]


@pytest.mark.parametrize(
    ("lengths", "num_calls"),
    [
        ([40, 150] * 6, 1),  # a second call would cost more than the padding
        ([100] * 32, 1),
        ([9000, 20], 2),  # far apart: padding would cost more than a call
        ([20, 9000, 20, 9000], 2),
        ([8000] * 4 + [10] * 4, 2),
    ],
)
def test_calls_are_as_few_as_pays(lengths: list[int], num_calls: int) -> None:
    assert len(runs(singles(lengths))) == num_calls


def test_padding_never_costs_more_than_the_calls_it_saves() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        lengths = [int(2 ** (float(torch.rand((), generator=generator)) * 13)) + 1 for _ in range(24)]
        cost = 0
        for run in runs(singles(lengths)):
            cost += len(run) * max(reading.num_keys for reading in run) + CALL_POSITIONS
        assert cost <= sum(lengths) + CALL_POSITIONS * len(lengths)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("has_mask", [True, False])
def test_shared_key_heads_softcap_and_sinks_are_what_the_formula_says(length: int, has_mask: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(2, length, 6, 8, generator=generator)
    key, value = torch.randn(2, 7, 3, 8, generator=generator), torch.randn(2, 7, 3, 4, generator=generator)
    mask = torch.zeros(2, 1, length, 7)
    if has_mask:
        mask[0, 0, :, 5:] = -torch.inf
    for softcap, sinks in ((None, None), (2.0, None), (None, torch.randn(6, generator=generator))):
        found = attend(query, key, value, mask=mask if has_mask else None, scale=0.3, softcap=softcap, sinks=sinks)
        scores = torch.einsum("rlhd,rkhd->rhlk", query, key.repeat_interleave(2, dim=2)) * 0.3
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = torch.exp(scores + mask)
        extra = 0.0 if sinks is None else torch.exp(sinks)[None, :, None, None]
        weights = weights / (weights.sum(-1, keepdim=True) + extra)
        expected = torch.einsum("rhlk,rkhd->rlhd", weights, value.repeat_interleave(2, dim=2))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
