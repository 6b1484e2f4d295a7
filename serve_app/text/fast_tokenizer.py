"""Reads the fast tokenizer of a model folder, the characters a token can hold, and the fill-in-the-middle markers.

Only transformers' own classes read or convert it; no code of the folder is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from serve_app.text.detokenizer import BYTE_ALPHABET, UnsupportedTokenizer, steps_of

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


# The longest canonical decomposition of a character is four characters long (U+1F82), so composing what a client
# wrote decomposed makes a text at most so many times shorter.
_COMPOSITION = 4
_KEEPING_NORMALIZERS = {"NFD", "NFKD", "Prepend", "Lowercase", "ByteLevel"}
_COMPOSING_NORMALIZERS = {"NFC", "NFKC"}
_KEEPING_SPLITS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}


def chars_per_token(tokenizer: Tokenizer) -> int | None:
    """Give the most characters of a client's text that end up in one token; None where nothing bounds them.

    Nothing does where a part of the tokenizer deletes text (accents, control characters, white space), where an added
    token swallows the white space beside it, or where a run of unknown characters is one token or none. What is not
    known here to keep every character is taken to delete some.
    """
    shrinkage = _shrinkage(tokenizer)
    added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    swallows = any(token.lstrip or token.rstrip for token in added.values())
    keeps_text = _keeps_splits(tokenizer) and _keeps_unknown(tokenizer)
    if shrinkage is None or swallows or not keeps_text:
        return None
    # A byte-level name has a character per byte, and no character of a text is less than a byte.
    names: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return shrinkage * max(map(len, names), default=1)


def _shrinkage(tokenizer: Tokenizer) -> int | None:
    """Return how many times shorter the normalizer can make a text; None if there is no bound."""
    steps = steps_of(tokenizer.normalizer, "normalizers")
    kinds = {step["type"] for step in steps if not _replaces_by_no_less(step)}
    if not kinds <= _KEEPING_NORMALIZERS | _COMPOSING_NORMALIZERS:
        return None
    return _COMPOSITION if kinds & _COMPOSING_NORMALIZERS else 1


def _replaces_by_no_less(step: Mapping[str, Any]) -> bool:
    if step["type"] != "Replace":
        return False
    pattern = step["pattern"].get("String")
    return pattern is not None and len(step["content"]) >= len(pattern)


def _keeps_splits(tokenizer: Tokenizer) -> bool:
    """Return whether the pre-tokenizer keeps all of the text."""
    steps = steps_of(tokenizer.pre_tokenizer, "pretokenizers")
    splits = [step for step in steps if step["type"] in ("Split", "Punctuation")]
    others = {step["type"] for step in steps} - {"Split", "Punctuation"}
    return others <= _KEEPING_SPLITS and all(step["behavior"] != "Removed" for step in splits)


def _keeps_unknown(tokenizer: Tokenizer) -> bool:
    """Return whether each character outside the vocabulary gives a token of its own, or tokens of its bytes."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True
    knows: Callable[[str], int | None] = tokenizer.token_to_id
    if model.byte_fallback:
        return all(knows(f"<0x{byte:02X}>") is not None for byte in range(256))
    steps = [*steps_of(tokenizer.normalizer, "normalizers"), *steps_of(tokenizer.pre_tokenizer, "pretokenizers")]
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    return is_byte_level and all(knows(letter) is not None for letter in BYTE_ALPHABET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """Token ids of fill in the middle, in the order prefix, suffix, middle.

    repository, separator: before the name of a project and of each file; None where the model has none
    ends: what ends the text in a gap beside the model's own end tokens
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    separator: int | None = None
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How a kind of models writes them; of several names the first that the tokenizer knows."""

    prefix: str
    suffix: str
    middle: str
    repository: tuple[str, ...] = ()
    separator: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


SPELLINGS = (
    Spelling(  # Qwen, CodeGemma, the demo model
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        repository=("<|repo_name|>",),
        separator=("<|file_sep|>", "<|file_separator|>"),
        ends=("<|fim_pad|>",),
    ),
    Spelling(  # StarCoder, Granite
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        repository=("<repo_name>", "<reponame>"),
        separator=("<file_sep>", "<filename>"),
        ends=("<fim_pad>",),
    ),
    Spelling(prefix="<fim-prefix>", suffix="<fim-suffix>", middle="<fim-middle>", ends=("<fim-pad>",)),  # SantaCoder
    Spelling(prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>", ends=("▁<EOT>",)),  # Code Llama
    Spelling(prefix="<PRE>", suffix="<SUF>", middle="<MID>", ends=("<EOT>",)),
    Spelling(prefix="<｜fim▁begin｜>", suffix="<｜fim▁hole｜>", middle="<｜fim▁end｜>", ends=("<|EOT|>",)),  # DeepSeek
    Spelling(prefix="<|code_prefix|>", suffix="<|code_suffix|>", middle="<|code_middle|>"),  # GLM
)


def find_markers(tokenizer: Tokenizer, named: Mapping[str, str], *, vocab_size: int) -> Markers | None:
    """Return the markers that the tokenizer names, or that a known kind of models uses; None if some are missing.

    vocab_size: of the model, which may lack tokens of its tokenizer
    """

    def id_of(*texts: str) -> int | None:
        ids = (tokenizer.token_to_id(text) for text in texts)
        return next((token_id for token_id in ids if token_id is not None and token_id < vocab_size), None)

    spellings: tuple[Spelling, ...] = SPELLINGS
    if all(name in named for name in NAMES):
        prefix, suffix, middle = (named[name] for name in NAMES)
        spellings = (Spelling(prefix=prefix, suffix=suffix, middle=middle), *SPELLINGS)
    extras = next((each for each in SPELLINGS if id_of(each.prefix) is not None), spellings[0])
    for spelling in spellings:
        prefix_id, suffix_id, middle_id = id_of(spelling.prefix), id_of(spelling.suffix), id_of(spelling.middle)
        if prefix_id is None or suffix_id is None or middle_id is None:
            continue
        repository, separator = id_of(*extras.repository), id_of(*extras.separator)
        ends = (repository, separator, *map(id_of, extras.ends))
        return Markers(
            prefix=prefix_id,
            suffix=suffix_id,
            middle=middle_id,
            repository=repository,
            separator=separator,
            ends=tuple(end for end in ends if end is not None),
        )
    return None


NAMES = "fim_prefix_token", "fim_suffix_token", "fim_middle_token"
"""Under which a tokenizer may name them itself."""
