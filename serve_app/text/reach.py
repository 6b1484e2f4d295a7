"""How many characters of a text one token can stand for, where a tokenizer sets a bound to that."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

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
    """How many times shorter the normalizer can make a text; None where there is no bound."""
    steps = _steps(tokenizer.normalizer, "normalizers")
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
    """Whether all that goes into the pre-tokenizer comes out of it."""
    steps = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    splits = [step for step in steps if step["type"] in ("Split", "Punctuation")]
    others = {step["type"] for step in steps} - {"Split", "Punctuation"}
    return others <= _KEEPING_SPLITS and all(step["behavior"] != "Removed" for step in splits)


def _keeps_unknown(tokenizer: Tokenizer) -> bool:
    """Whether every character that the vocabulary lacks gives a token of its own, or tokens of its bytes."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True
    knows: Callable[[str], int | None] = tokenizer.token_to_id
    if model.byte_fallback:
        return all(knows(f"<0x{byte:02X}>") is not None for byte in range(256))
    steps = [*_steps(tokenizer.normalizer, "normalizers"), *_steps(tokenizer.pre_tokenizer, "pretokenizers")]
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    return is_byte_level and all(knows(letter) is not None for letter in _byte_letters())


def _byte_letters() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(code) for code in (*shown, *range(256, 512 - len(shown)))]


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """List the steps of a normalizer or pre-tokenizer, sequences flattened.

    name: under which a sequence of that kind keeps its parts
    """
    if part is None:
        return []
    steps: list[dict[str, Any]] = [json.loads(part.__getstate__())]
    while any(step["type"] == "Sequence" for step in steps):
        steps = [inner for step in steps for inner in (step[name] if step["type"] == "Sequence" else (step,))]
    return steps
