"""Kernels are compiled where there is a GPU, and interpreted where there is none; without triton they are skipped."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
