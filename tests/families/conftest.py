"""Folders of small random models, each made when first asked for and kept for the session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers.utils.logging import disable_progress_bar

from tests.families.families import Family
from tests.families.making import save_model
from tests.families.sighted import Sighted, save_sighted


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


@pytest.fixture(scope="session")
def sighted_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sighted], Path]:
    """Gives the folder of a kind's model."""
    root = tmp_path_factory.mktemp("sighted")

    def make(kind: Sighted) -> Path:
        folder = root / kind.label
        if not folder.exists():
            save_sighted(kind, folder)
        return folder

    return make


@pytest.fixture(scope="session", autouse=True)
def no_progress_bars() -> None:
    """Two for each of some hundred models."""
    disable_progress_bar()
