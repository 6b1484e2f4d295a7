"""Whose kernels compute attention: what was asked for, and Triton's by themselves only on a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import pytest
import torch

from serve_app.engine.decoder import loading
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
    assert choose_kernels(wanted, CPU, has={"triton"}.__contains__) == [chosen]


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


@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_kernels_that_were_asked_for_and_cannot_be_had_are_refused_at_start(
    name: Literal["flashinfer", "triton"], monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    assert choose_kernels(name, CPU) == ["torch"], "a file for GPUs serves on CPUs, too"
    monkeypatch.setattr(loading, "choose_kernels", lambda wanted, device: choose_kernels(wanted, CUDA))
    with pytest.raises(
        ModelNotSupported, match=f"kernels: {name} was asked for: No module named '{name}'. Leave `kernels` out"
    ):
        load_model(config(DEMO, kernels=name))
