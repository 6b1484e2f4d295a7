"""Models for the engine's tests: the embedded demo, and small random models of many architectures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_MODELS = ROOT.parent / "shared" / "models"
DEMO = ROOT / "serve_app" / "demo" / "model"
DEMO_ADAPTERS = ROOT / "adapters" / "demo"
ARCHITECTURES = [
    "llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text", "gpt2", "mixtral", "qwen2_moe",
]  # fmt: skip


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small random model per architecture."""
    script = SHARED_MODELS / "make_random.py"
    if not script.exists():
        pytest.skip("the maker of random models is not here")
    out = tmp_path_factory.mktemp("random_models")
    command = [sys.executable, script, "--tokenizer", SHARED_MODELS / "stories260K", "--out", out, *ARCHITECTURES]
    made = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return out
