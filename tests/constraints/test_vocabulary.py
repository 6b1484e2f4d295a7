"""The model's tokens in the library's hands: the same bytes, padding never allowed, ends only where there is one."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve_app.catalog.models import BUILTIN_MODELS
from serve_app.constraints.compilation import build_matcher, compile_source
from serve_app.constraints.vocabulary import Vocabulary
from serve_app.replica.service import vocabulary_of
from serve_app.text.tokenizer import TextTokenizer

FOLDER = BUILTIN_MODELS["builtin:demo"]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(FOLDER, vocab_size=2048 + 37)  # padded, as models are


def allowed(matcher: LLMatcher, num_ids: int) -> list[int]:
    mask = matcher.compute_bitmask()
    return [token_id for token_id in range(num_ids) if mask[token_id // 8] >> (token_id % 8) & 1]


def matcher_of(tokenizer: LLTokenizer, regex: str) -> LLMatcher:
    return build_matcher(compile_source("regex", regex, tokenizer).text, tokenizer)


def test_tokens_are_those_that_the_library_reads_of_the_tokenizers_own_file(tokenizer: TextTokenizer) -> None:
    """The same masks, and the same cuts of forced text, as where the library reads the tokenizer by itself."""
    vocabulary = vocabulary_of(tokenizer, frozenset({0}))
    own = vocabulary.tokenizer(tokenizer.encode_literal)
    file = (FOLDER / "tokenizer.json").read_text(encoding="utf-8")
    by_file = LLTokenizer(file, n_vocab=len(vocabulary), eos_token=[0])
    for regex in (".*", "[a-z ]{3,}", '"[^"]*"', "(yes|no)+", "\\d{2,4}"):
        found = [allowed(matcher_of(each, regex), len(vocabulary)) for each in (by_file, own)]
        assert found[0] == found[1] != []
    text = "Once upon a time"
    assert by_file.tokenize_str(text) == own.tokenize_str(text) == list(tokenizer.encode_literal(text))


@pytest.mark.parametrize("schema", ['{"type": "string"}', '{"type": "string", "maxLength": 12}', '{"maxLength": 40}'])
def test_no_mask_depends_on_slices(tokenizer: TextTokenizer, schema: str) -> None:
    """They only say sooner what may come."""
    own = vocabulary_of(tokenizer, frozenset({0})).tokenizer(tokenizer.encode_literal)
    grammar = compile_source("json_schema", schema, own).text
    matchers = [build_matcher(grammar, each) for each in (own, own.with_slices([]))]
    for token_id in own.tokenize_str('"a text that goes on for longer than 12 or 30, and ends"'):
        masks = [allowed(each, own.vocab_size) for each in matchers]
        assert masks[0] == masks[1] != []
        if token_id not in masks[0]:
            break
        for each in matchers:
            each.consume_token(token_id)


def test_neither_padding_nor_special_tokens_are_ever_allowed(tokenizer: TextTokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer, frozenset({0, 7}))
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
