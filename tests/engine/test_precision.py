"""Which numbers a model computes in."""

from __future__ import annotations

import pytest
import torch

from serve_app.engine.decoder.config_check import choose_dtype
from serve_app.engine.decoder.linears import cpu_is_fast

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16])
def test_what_a_cpu_would_emulate_is_computed_in_float32(own: torch.dtype) -> None:
    assert choose_dtype("auto", own, CPU, is_fast=lambda dtype: False) == torch.float32
    assert choose_dtype("auto", own, CPU, is_fast=lambda dtype: dtype == own) == own
    assert choose_dtype("auto", own, CUDA, is_fast=lambda dtype: False) == own


def test_a_type_that_is_asked_for_is_taken() -> None:
    assert choose_dtype("bfloat16", torch.float32, CPU, is_fast=lambda dtype: False) == torch.bfloat16


@pytest.mark.parametrize("own", [None, torch.float32])
def test_full_floats_stay(own: torch.dtype | None) -> None:
    assert choose_dtype("auto", own, CPU, is_fast=lambda dtype: False) == torch.float32


def test_this_machine_can_be_asked() -> None:
    assert cpu_is_fast(torch.bfloat16) in {True, False}
    assert not cpu_is_fast(torch.int8)
