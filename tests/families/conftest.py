"""Folders of small random models, each made when first asked for and kept for the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.families.families import Family
from tests.families.making import save_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """Gives the folder of a family's model."""
    root = tmp_path_factory.mktemp("families")

    def make(family: Family) -> Path:
        folder = root / family.label
        if not folder.exists():
            save_model(family.name, family.settings, folder, seed=family.seed)
        return folder

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a product is sooner computed than shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
