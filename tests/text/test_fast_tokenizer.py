"""A folder's tokenizer is read or converted by the library's own classes, or the error says how to make one."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from serve_app.text.detokenizer import UnsupportedTokenizer
from serve_app.text.fast_tokenizer import read_fast

VOCABULARY = {"a": 0, "b": 1, "ab": 2, "\u0120": 3, "\u0120ab": 4, "<|endoftext|>": 5}
MERGES = "#version: 0.2\na b\n\u0120 ab\n"
TEKKEN = {
    "config": {"pattern": "[^\\s]+|\\s+", "default_vocab_size": 259, "default_num_special_tokens": 3, "version": "v3"},
    "vocab": [
        {"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode(), "token_str": None}
        for rank in range(256)
    ],
    "special_tokens": [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(("<unk>", "<s>", "</s>"))
    ],
}
OWN_CODE = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}


def whole() -> str:
    tokenizer = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[("a", "b"), ("\u0120", "ab")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return str(tokenizer.to_str())


def folder(path: Path, family: str, files: Mapping[str, Any]) -> Path:
    """Write a folder's small files; its code leaves a file where anybody runs it."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    (path / "tokenization_own.py").write_text("from pathlib import Path\nPath(__file__).with_name('RAN').touch()\n")
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name).write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("family", "files"),
    [
        ("gpt2", {"vocab.json": VOCABULARY, "merges.txt": MERGES}),
        ("qwen2", {"vocab.json": VOCABULARY, "merges.txt": MERGES, "tokenizer_config.json": {}}),
        ("bert", {"vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nab\na\n##b\n"}),
        ("mistral", {"tekken.json": TEKKEN}),
    ],
)
def test_a_tokenizer_without_its_file_is_converted(family: str, files: dict[str, Any], tmp_path: Path) -> None:
    made, notes = read_fast(folder(tmp_path, family, files))
    assert made.backend_tokenizer.encode("ab").ids
    assert notes == ()


@pytest.mark.parametrize(
    "settings",
    [
        OWN_CODE,
        {"auto_map": ["tokenization_own.OwnTokenizer", None]},
        {"auto_map": {"AutoTokenizer": "tokenization_own.OwnTokenizer"}},
        {"auto_map": {"AutoTokenizer": ["elsewhere/own--tokenization_own.OwnTokenizer"]}},
        {"tokenizer_class": "NobodysTokenizer"},
        {"tokenizer_class": "CanineTokenizer"},
        {"tokenizer_class": "AutoModelForCausalLM"},
        {"tokenizer_class": "pipeline"},
    ],
)
@pytest.mark.parametrize("family", ["llama", "minicpm3", "of_nobody"])
def test_a_whole_file_is_read_whatever_class_is_named_and_no_code_is_run(
    settings: dict[str, Any], family: str, tmp_path: Path
) -> None:
    path = folder(tmp_path, family, {"tokenizer.json": whole(), "tokenizer_config.json": settings})
    made, notes = read_fast(path)
    assert made.backend_tokenizer.encode("ab").ids == [2]
    assert not (path / "RAN").exists()
    assert bool(notes) or "auto_map" not in settings


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, r"to have it: python -c \"from transformers import AutoTokenizer as T; T.from_pretrained\('"),
        ({"tokenizer_config.json": OWN_CODE}, r"no code of a folder is run.*read that code.*trust_remote_code=True"),
        (
            {"tokenizer_config.json": OWN_CODE, "tiktoken.model": f"{base64.b64encode(b'a').decode()} 0\n"},
            "no code of a folder is run",  # which has the pattern that texts are cut by
        ),
        ({"tokenizer.json": "{}"}, "tokenizer.json of .* cannot be read"),
    ],
)
def test_what_cannot_be_made_is_told_with_the_way_to_it(files: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTokenizer, match=told):
        read_fast(folder(tmp_path, "llama", files))
    assert not (tmp_path / "RAN").exists()


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="what is to be missing is installed")
def test_a_package_that_a_conversion_takes_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTokenizer, match=r"tokenizer\.model takes a package.*pip install sentencepiece"):
        read_fast(folder(tmp_path, "llama", {"tokenizer.model": "of sentencepiece"}))
