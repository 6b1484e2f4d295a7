"""The model's tokens in the library's hands: the same bytes, padding never allowed, ends only where there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

import serve_app.demo
from serve_app.constraints.compilation import build_matcher, compile_source
from serve_app.constraints.vocabulary import Vocabulary
from serve_app.engine.masks import vocabulary_of
from serve_app.text.tokenizer import TextTokenizer

FOLDER = Path(serve_app.demo.__file__).parent / "model"


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(FOLDER, vocab_size=2048 + 37)  # padded, as models are


def allowed(matcher: LLMatcher, num_ids: int) -> list[int]:
    mask = matcher.compute_bitmask()
    return [token_id for token_id in range(num_ids) if mask[token_id // 8] >> (token_id % 8) & 1]


def matcher_of(tokenizer: LLTokenizer, regex: str) -> LLMatcher:
    return build_matcher(compile_source("regex", regex, tokenizer).text, tokenizer)


def test_the_definition_and_the_pieces_say_the_same(tokenizer: TextTokenizer) -> None:
    """Whether the library reads the tokenizer itself or the bytes that we know, a text may have the same tokens."""
    vocabulary = vocabulary_of(tokenizer, frozenset({0}))
    by_file = vocabulary.tokenizer()
    by_bytes = replace(vocabulary, definition="").tokenizer(tokenizer.encode_literal)
    for regex in (".*", "[a-z ]{3,}", '"[^"]*"', "(yes|no)+", "\\d{2,4}"):
        found = [allowed(matcher_of(each, regex), len(vocabulary)) for each in (by_file, by_bytes)]
        assert found[0] == found[1] != []
    text = "Once upon a time"
    assert by_file.tokenize_str(text) == list(tokenizer.encode_literal(text))


@pytest.mark.parametrize("definition", [True, False])
def test_neither_padding_nor_special_tokens_are_ever_allowed(tokenizer: TextTokenizer, definition: bool) -> None:
    vocabulary = vocabulary_of(tokenizer, frozenset({0, 7}))
    if not definition:
        vocabulary = replace(vocabulary, definition="")
    tokens = allowed(matcher_of(vocabulary.tokenizer(), "(?s:.)*"), vocabulary.num_words * 32)
    without_text = {token_id for token_id, piece in enumerate(vocabulary.pieces) if not piece}
    assert set(tokens) & without_text == {0, 7}  # the ends, 7 though it has bytes of its own
    assert max(tokens) < 2048


def test_a_model_without_an_end_ends_where_its_grammar_does(tokenizer: TextTokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer, frozenset())
    matcher = matcher_of(vocabulary.tokenizer(), "a?")
    assert vocabulary.num_ids == len(vocabulary) + 1
    assert len(matcher.compute_bitmask()) == vocabulary.num_words * 4
    assert allowed(matcher, vocabulary.num_ids)[-1] == len(vocabulary)


def test_text_that_is_cut_into_ids_beyond_the_model_is_cut_by_its_own_tokens() -> None:
    vocabulary = Vocabulary(pieces=(b"a", b"b", b"ab", None), eos_token_ids=(3,))
    tokenizer = vocabulary.tokenizer(lambda text: [99])
    assert allowed(matcher_of(tokenizer, "abab"), 4)


def test_special_tokens_are_named_but_for_those_that_end_a_text(tokenizer: TextTokenizer) -> None:
    named = dict(vocabulary_of(tokenizer, frozenset()).special)
    assert set(named.values()) == tokenizer.special_ids
    name, ends = next(iter(named.items()))
    assert name not in dict(vocabulary_of(tokenizer, frozenset({ends})).special)
