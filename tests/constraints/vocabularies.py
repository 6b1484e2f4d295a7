"""A vocabulary of every byte and a few longer tokens, and what a grammar does to texts in it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from llguidance import LLMatcher, LLTokenizer

from serve_app.constraints.compilation import build_matcher, compile_source
from serve_app.constraints.vocabulary import Vocabulary
from serve_app.core.request import ConstraintKind

WORDS = (b"ab", b'": ', b'{"', b'"}', b"[]", b"12", b"true", b"\xc3", b"  ")
EOS = 256 + len(WORDS)
BYTES = Vocabulary(pieces=(*(bytes([each]) for each in range(256)), *WORDS, None), eos_token_ids=(EOS,))


@cache
def tokenizer() -> LLTokenizer:
    return BYTES.tokenizer()


def matcher_of(kind: ConstraintKind, source: str) -> LLMatcher:
    """Raises Refusal."""
    grammar = compile_source(kind, source, tokenizer())
    return build_matcher(grammar.text, tokenizer(), has_rules=grammar.has_rules)


def accepts(kind: ConstraintKind, source: str, text: str) -> bool:
    """Whether the whole text is of the language, byte for byte."""
    matcher = matcher_of(kind, source)
    content = text.encode()
    return matcher.try_consume_tokens(list(content)) == len(content) and matcher.is_accepting()


def allowed(matcher: LLMatcher) -> list[int]:
    """Tokens that may come next."""
    mask = matcher.compute_bitmask()
    return [token_id for token_id in range(len(BYTES)) if mask[token_id // 8] >> (token_id % 8) & 1]


def accepted_of(kind: ConstraintKind, source: str, texts: str) -> Iterator[str]:
    """Those of the texts, which stand apart by blanks, that are of the language."""
    yield from (text for text in texts.split(" ") if accepts(kind, source, text))
