"""What a folder's generation_config.json recommends, and what of it is not heard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_app.catalog.defaults import GENERATION_CONFIG, read_default_sampling

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "real-folders"


def read(folder: Path, said: object) -> tuple[dict[str, float], tuple[str, ...]]:
    (folder / GENERATION_CONFIG).write_text(said if isinstance(said, str) else json.dumps(said))
    found = read_default_sampling(folder)
    return dict(found.values), found.unheard


@pytest.mark.parametrize(
    ("said", "values"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True},
         {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.05},
         {"min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.05}),
        ({"temperature": 0.7, "do_sample": False, "max_new_tokens": 2048}, {"temperature": 0.0, "max_tokens": 2048}),
        ({"top_k": -1, "top_p": None, "_from_model_config": True, "eos_token_id": [1, 2]}, {"top_k": 0}),
        ({"temperature": 1, "top_k": 50.0}, {"temperature": 1.0, "top_k": 50}),
        ({}, {}),
    ],
)  # fmt: skip
def test_what_the_sampler_has_is_taken(tmp_path: Path, said: dict[str, object], values: dict[str, float]) -> None:
    assert read(tmp_path, said) == (values, ())
    assert all(isinstance(value, int) for name, value in values.items() if name in ("top_k", "max_tokens"))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size"),
        ({"": 3}, GENERATION_CONFIG),
        ('{"temperature": NaN}', GENERATION_CONFIG),
        ("[]", GENERATION_CONFIG),
    ],
)
def test_what_cannot_be_followed_counts_as_not_said_and_is_told(tmp_path: Path, said: object, named: str) -> None:
    values, (sentence,) = read(tmp_path, said)
    assert values == {}
    assert named in sentence


def test_a_folder_that_recommends_nothing_is_silent(tmp_path: Path) -> None:
    assert read_default_sampling(tmp_path).values == read_default_sampling(tmp_path).unheard == ()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folders of real models are not here")
def test_real_folders_say_nothing_wrong() -> None:
    for file in SHARED.glob(f"*/{GENERATION_CONFIG}"):
        said, found = json.loads(file.read_text()), read_default_sampling(file.parent)
        assert not any("must be" in sentence for sentence in found.unheard), file
        for name in said.keys() & {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}:
            assert dict(found.values)[name] == said[name], file
