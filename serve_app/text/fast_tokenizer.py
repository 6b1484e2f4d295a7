"""Reads or makes the fast tokenizer of a model folder by transformers' own classes; no code of the folder is run."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from serve_app.text.pieces import UnsupportedTokenizer

FILE = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
CONFIG = "tokenizer_config.json"
NO_CODE = "no code of a folder is run"
COMMAND = 'python -c "from transformers import AutoTokenizer as T; T.from_pretrained({path!r}{more}).save_pretrained({path!r})"'  # fmt: skip  # noqa: E501


def read_fast(path: Path) -> tuple[PreTrainedTokenizerBase, tuple[str, ...]]:
    """Give the tokenizer that transformers makes of a folder, and what is worth telling of how it was made.

    The library chooses a class by the folder's configurations. Where that class is code of the folder, is not there or
    cannot be fast, the library's plain class reads tokenizer.json, or converts what it knows.
    Raises UnsupportedTokenizer.
    """
    named = _named(path)
    has_code = bool(named.get("auto_map"))
    try:
        _check_class(named.get("tokenizer_class"))
        chosen = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False, use_fast=True)
        if chosen.is_fast:
            _check_pattern(chosen, path, has_code=has_code)
            return chosen, (f"{CONFIG}: auto_map is left out: {NO_CODE}",) if has_code else ()
        reason = f"{type(chosen).__name__} is a slow one, whose kind has no {FILE}"
    except Exception as error:  # each class fails in ways of its own
        reason = NO_CODE if has_code else _in_one_line(error)
    try:
        plain: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        _check_pattern(plain, path, has_code=has_code)
    except Exception as error:
        if (path / FILE).is_file():
            raise UnsupportedTokenizer(f"{FILE} of {path} cannot be read: {_in_one_line(error)}") from error
        raise UnsupportedTokenizer(_way_out(path, reason, has_code=has_code)) from error
    return plain, (f"{CONFIG}: tokenizer_class {named.get('tokenizer_class')!r} is left out: {reason}",)


def _named(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_class(name: object) -> None:
    """Raise ValueError for what the library has under the name and is no tokenizer: it would be asked to load."""
    kind = getattr(transformers, str(name), None)
    if kind is not None and not (isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerBase)):
        raise ValueError(f"{name} is no tokenizer")


def _check_pattern(loaded: PreTrainedTokenizerBase, path: Path, *, has_code: bool) -> None:
    """Raise ValueError where the pattern that cuts texts is in the folder's code, and another was taken for it."""
    if has_code and not (path / FILE).is_file() and "ByteLevel" in repr(loaded.backend_tokenizer.pre_tokenizer):
        raise ValueError(NO_CODE)


def _way_out(path: Path, reason: str, *, has_code: bool) -> str:
    """Say how a folder comes by its tokenizer.json."""
    if (path / SENTENCEPIECE).is_file() and find_spec("sentencepiece") is None:
        told, steps = f"to convert {SENTENCEPIECE} takes a package", "pip install sentencepiece"
    elif has_code:
        command = COMMAND.format(path=str(path), more=", trust_remote_code=True")
        told, steps = reason, f"read that code, and where you trust it: {command}"
    else:
        told, steps = reason, COMMAND.format(path=str(path), more="")
    return f"{FILE} is missing in {path}, and transformers makes none of its files ({told}); to have it: {steps}"


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
