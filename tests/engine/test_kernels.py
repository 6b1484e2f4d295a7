"""Whose kernels compute attention: what was asked for, and Triton's by themselves only on a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import pytest
import torch

from serve_app.engine.decoder.loading import load_model
from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.kernels.interface import choose_kernels
from tests.engine.conftest import DEMO
from tests.engine.harness import config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [("auto", "torch"), ("triton", "triton"), ("torch", "torch")],
)
def test_on_a_cpu_tritons_are_taken_only_where_they_are_asked_for(
    wanted: Literal["auto", "triton", "torch"], chosen: str
) -> None:
    assert choose_kernels(wanted, CPU) == [chosen]


@pytest.mark.parametrize(
    ("installed", "tried"),
    [
        ({"triton", "flashinfer"}, ["flashinfer", "triton", "torch"]),
        ({"triton"}, ["triton", "torch"]),
        ({"flashinfer"}, ["torch"]),
        (set(), ["torch"]),
    ],
)
def test_on_a_gpu_the_best_that_is_installed_is_tried_first(installed: set[str], tried: list[str]) -> None:
    assert choose_kernels("auto", CUDA, has=installed.__contains__) == tried
    assert choose_kernels("auto", CPU, has=installed.__contains__) == ["torch"]
    assert choose_kernels("triton", CUDA, has=installed.__contains__) == ["triton"]


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_flashinfer_that_was_asked_for_and_is_not_installed_is_refused_at_start() -> None:
    with pytest.raises(ModelNotSupported, match="kernels: flashinfer was asked for: No module named 'flashinfer'"):
        load_model(config(DEMO, kernels="flashinfer"))


@pytest.mark.skipif(find_spec("triton") is not None, reason="triton is installed")
def test_kernels_that_were_asked_for_and_cannot_be_had_are_refused_at_start() -> None:
    with pytest.raises(ModelNotSupported, match="kernels: triton was asked for: No module named 'triton'"):
        load_model(config(DEMO, kernels="triton"))
