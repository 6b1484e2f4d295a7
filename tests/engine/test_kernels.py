"""Whose kernels compute attention: what was asked for, and Triton's by themselves only on a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import pytest
import torch

from serve_app.engine.errors import ModelNotSupported
from serve_app.engine.gpu.availability import choose_kernels
from serve_app.engine.loading import load_model
from tests.engine.conftest import DEMO
from tests.engine.harness import config


@pytest.mark.parametrize(
    ("wanted", "is_paged", "chosen"),
    [("auto", True, "torch"), ("triton", True, "triton"), ("triton", False, "torch"), ("torch", True, "torch")],
)
def test_on_a_cpu_tritons_are_taken_only_where_they_are_asked_for(
    wanted: Literal["auto", "triton", "torch"], is_paged: bool, chosen: str
) -> None:
    assert choose_kernels(wanted, torch.device("cpu"), is_paged=is_paged) == chosen


@pytest.mark.skipif(find_spec("triton") is not None, reason="triton is installed")
def test_kernels_that_were_asked_for_and_cannot_be_had_are_refused_at_start() -> None:
    with pytest.raises(ModelNotSupported, match="kernels: triton was asked for: No module named 'triton'"):
        load_model(config(DEMO, kv_storage="pages", kernels="triton"))
