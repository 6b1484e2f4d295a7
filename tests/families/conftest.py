"""Folders of small random models, each made when first asked for and kept for the session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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
