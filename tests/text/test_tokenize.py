"""Texts to tokens and back for /tokenize, with the embedded model's tokenizer."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from serve_app.catalog.models import BUILTIN_MODELS
from serve_app.core.prompt import TokenizeRequest
from serve_app.text.tokenizer import TextTokenizer

TOKENIZER = BUILTIN_MODELS["builtin:demo"] / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    loaded = Tokenizer.from_file(str(TOKENIZER))
    return TextTokenizer(loaded, vocab_size=loaded.get_vocab_size())


@pytest.mark.parametrize("text", ["", "Once upon a time", "naïve 東京 🦊 x", "a <|endoftext|> b", "  \n\t "])
@pytest.mark.parametrize("parses_special", [True, False])
def test_a_text_comes_back_from_its_tokens(tokenizer, text, parses_special):
    found = tokenizer.tokenize(TokenizeRequest(text=text, parses_special=parses_special, with_pieces=True))
    assert tokenizer.untokenize(found.token_ids) == text
    assert found.pieces is not None
    assert b"".join(found.pieces).decode() == text


def test_a_special_token_written_out_is_one_token_only_where_it_is_parsed(tokenizer):
    written = "<|endoftext|>"
    parsed = tokenizer.tokenize(TokenizeRequest(text=written)).token_ids
    literal = tokenizer.tokenize(TokenizeRequest(text=written, parses_special=False)).token_ids
    assert len(parsed) == 1
    assert set(parsed) <= tokenizer.special_ids
    assert len(literal) > 1
    assert not set(literal) & tokenizer.special_ids
