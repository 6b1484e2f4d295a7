"""Real tokenizers of every kind the text room supports, by name; those not at hand are skipped."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from serve_app.text.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "demo": ROOT / "serve_app" / "demo" / "model",
    "stories260K": ROOT / ".." / "shared" / "models" / "stories260K",
    "tinystories-656K": ROOT / ".." / "shared" / "models" / "tinystories-656K",
    "babyllama-105": ROOT / ".." / "shared" / "models" / "babyllama-105",
    "sort-gpt2": ROOT / ".." / "shared" / "models" / "sort-gpt2",
}
VOCAB_SIZES = {"demo": 2048, "stories260K": 512, "tinystories-656K": 2048, "babyllama-105": 105, "sort-gpt2": 3}


@cache
def load(name: str) -> TextTokenizer:
    return TextTokenizer.load(FOLDERS[name], vocab_size=VOCAB_SIZES[name])


def folder_of(name: str) -> Path:
    if not (FOLDERS[name] / "tokenizer.json").is_file():
        pytest.skip(f"the tokenizer of {name} is not here")
    return FOLDERS[name]


@pytest.fixture(scope="session", params=list(FOLDERS))
def name(request: pytest.FixtureRequest) -> str:
    folder_of(request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def tokenizer(name: str) -> TextTokenizer:
    return load(name)


@pytest.fixture(scope="session")
def reference(name: str) -> AutoTokenizer:
    """The library's own tokenizer of the same folder."""
    return AutoTokenizer.from_pretrained(FOLDERS[name], local_files_only=True)


@pytest.fixture(scope="session")
def demo() -> TextTokenizer:
    """A byte-level tokenizer that puts nothing before a text."""
    folder_of("demo")
    return load("demo")


@pytest.fixture(scope="session")
def stories() -> TextTokenizer:
    """A sentencepiece tokenizer with byte tokens and a BOS."""
    folder_of("stories260K")
    return load("stories260K")
