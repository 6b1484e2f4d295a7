"""Models for the engine's tests: the embedded demo, and small random models of a few architectures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families.making import save_model

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "serve_app" / "demo" / "model"
DEMO_ADAPTERS = ROOT / "adapters" / "demo"
SHARED_MODELS = ROOT.parent / "shared" / "models"  # where there are any; what needs them skips without
ROOMIER = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 512}
ARCHITECTURES = {
    "llama": ROOMIER,
    "mistral": ROOMIER,
    "gpt2": {"n_embd": 64, "n_inner": 128, "vocab_size": 512},
}  # every other one is in tests/families


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small random model per architecture."""
    out = tmp_path_factory.mktemp("random_models")
    for architecture, settings in ARCHITECTURES.items():
        save_model(architecture, settings, out / architecture)
    return out
