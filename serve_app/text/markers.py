"""Finds the tokens with which a model was trained to fill gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer


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
NAMES = "fim_prefix_token", "fim_suffix_token", "fim_middle_token"
"""Under which a tokenizer may name them itself."""


def find_markers(tokenizer: Tokenizer, named: Mapping[str, str], *, vocab_size: int) -> Markers | None:
    """The markers that the tokenizer names or that are spelled as a known kind's; None where some are missing.

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
