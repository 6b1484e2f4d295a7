"""A tokenizer over another's vocabulary cuts as the other does, or is not made."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from serve_app.catalog.models import BUILTIN_MODELS
from serve_app.text.tokenizer import sharing_model

DEMO = BUILTIN_MODELS["builtin:demo"] / "tokenizer.json"
TEXTS = (
    "Once upon a time,  two spaces\n",
    " a space before",
    "<|endoftext|> and <|fim_prefix|>x<|note|> y",
    "日本語 ü 🙂",
    "\u0301 composed é",
    "",
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(DEMO))
    tokenizer.add_tokens([AddedToken("<|note|>", lstrip=True, normalized=True), AddedToken("upon", single_word=True)])
    return tokenizer


def word_pieces() -> Tokenizer:
    """As sentencepiece's are: a mark for a space, bytes for what has no piece."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["<unk>", "▁a", "▁", "a", "t", "o", "upon", "▁upon"]
    tokenizer = Tokenizer(
        models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("<|endoftext|>")])
    return tokenizer


@pytest.mark.parametrize("tokenizer", [byte_level(), word_pieces()], ids=["bytes", "pieces"])
@pytest.mark.parametrize("takes_special", [True, False])
def test_it_cuts_as_the_other_does(tokenizer: Tokenizer, takes_special: bool) -> None:
    twin, copy = sharing_model(tokenizer), Tokenizer.from_str(tokenizer.to_str())
    assert twin is not None
    for each in (twin, copy):
        each.encode_special_tokens = not takes_special
    for text in TEXTS:
        found, expected = (each.encode(text, add_special_tokens=False) for each in (twin, copy))
        assert (found.ids, found.offsets) == (expected.ids, expected.offsets)
        assert twin.decode(found.ids, skip_special_tokens=False) == copy.decode(found.ids, skip_special_tokens=False)
    assert tokenizer.encode_special_tokens is False, "the other one goes on as it was"


def test_where_added_tokens_would_be_numbered_otherwise_there_is_none() -> None:
    tokenizer = byte_level()
    tokenizer.model = models.WordLevel({f"word{at}": at for at in range(5000)}, unk_token="word0")  # nosec B106
    assert max(tokenizer.get_added_tokens_decoder()) < 5000
    assert sharing_model(tokenizer) is None
