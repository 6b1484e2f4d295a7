"""Without the folder of kernels for CPUs the engine computes the same by torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = (
    "test_parity.py",
    "test_laws.py",
    "test_adapters.py",
    "test_quantised_models.py",
    "test_sampling.py::test_mixed_requests_say_the_same_alone_and_in_a_crowd_that_is_preempted",
)
ASKS = """
import sys
sys.modules["serve_app.kernels.cpu"] = None
import torch
from serve_app.kernels import interface as kernels
assert kernels.attention_kernels(2, 32, torch.float32) == (None, None)
assert not kernels.may_read(torch.Size([64, 64]), torch.bfloat16)
assert kernels.laid_out(torch.ones(64, 64), None) is None
assert kernels.whole_rows(torch.ones(64, 64, dtype=torch.int8), torch.ones(64)) is None
assert kernels.adapter_kernels(
    [torch.ones(64, 64)], [8], device=torch.device("cpu"), dtype=torch.float32, uses_triton=False
) is None
assert "llvmlite" not in sys.modules
"""


def test_each_question_is_answered_with_none() -> None:
    done = subprocess.run([sys.executable, "-c", ASKS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Kernels of our own are missing") == 1, "it is told once"


@pytest.mark.slow
def test_the_engines_core_tests_pass_without_them() -> None:
    """In one process, without the draws and refusals that have nothing to do with kernels."""
    words = ["-m", "pytest", "-q", "-x", "-n0", "-p", "tests.kernels.without_cpu", "-p", "no:cacheprovider"]
    command = [sys.executable, *words, *(f"tests/engine/{test}" for test in CORE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
