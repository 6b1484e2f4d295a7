"""Texts are cut as the library cuts each alone, beside other threads; a token holds a bounded piece of text."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from serve_app.catalog.models import BUILTIN_MODELS
from serve_app.core.prompt import TokenizeRequest
from serve_app.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.slow

DEMO = BUILTIN_MODELS["builtin:demo"] / "tokenizer.json"
CORPUS = ["Once upon a time there was a fox.", "naïve 東京 🦊 café", "   spaces\n\n\tand tabs    ", "a" * 60, "=" * 40]
ALPHABET = "abc xyzé\n\t=東🦊ǖ…  ﬁ\u0301\u200b" + "aaaa    "


def random_texts(seed: int = 7, count: int = 200) -> list[str]:
    rng = random.Random(seed)
    texts = ["".join(rng.choices(ALPHABET, k=rng.randrange(1, 80))) for _ in range(count)]
    return [*texts, *CORPUS, "", " ", "<s>", "x<s>  y", "ǖ" * 30, "u\u0308\u0304" * 30, " " * 300]


def byte_level_bpe(*, normalizer: object = None) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: bytes behind a splitting pattern."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\s+(?!\S)| ?[^\s]+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_bpe(*, has_bytes: bool = True) -> Tokenizer:
    """As Llama 2: a word mark for a space, and byte tokens for what the vocabulary lacks."""
    letters = [*"abcxyz▁e", *([f"<0x{byte:02X}>" for byte in range(256)] if has_bytes else []), "aa", "▁▁", "aaaa"]
    vocabulary = {"<unk>": 0, "<s>": 1} | {name: number + 2 for number, name in enumerate(letters)}
    merges = [("a", "a"), ("▁", "▁"), ("aa", "aa")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=has_bytes))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in "abcxyze")], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "abc": 1, "x": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def swallowing() -> Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return tokenizer


def removing() -> Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(False)]
    )
    return tokenizer


def lacking_a_byte() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


KEEPING: dict[str, Callable[[], Tokenizer]] = {
    "demo": lambda: Tokenizer.from_file(str(DEMO)),
    "byte-level": byte_level_bpe,
    "byte-level-nfc": lambda: byte_level_bpe(normalizer=normalizers.NFC()),
    "byte-level-nfkc": lambda: byte_level_bpe(normalizer=normalizers.NFKC()),
    "sentencepiece": sentencepiece_bpe,
}
DELETING: dict[str, Callable[[], Tokenizer]] = {
    "strip": lambda: byte_level_bpe(normalizer=normalizers.Strip()),
    "accents": lambda: byte_level_bpe(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "shortening": lambda: byte_level_bpe(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "fused-unknown": lambda: sentencepiece_bpe(has_bytes=False),
    "unigram": unigram,
    "words": words,
    "swallowing": swallowing,
    "removing": removing,
    "lacking-a-byte": lacking_a_byte,
}


def made(maker: Callable[[], Tokenizer]) -> TextTokenizer:
    inner = maker()
    return TextTokenizer(inner, vocab_size=inner.get_vocab_size())


@pytest.mark.parametrize("kind", [*KEEPING, *DELETING])
def test_texts_are_cut_as_the_library_cuts_each_alone(kind: str) -> None:
    maker = (KEEPING | DELETING)[kind]
    reference, tokenizer, texts = maker(), made(maker), random_texts()
    expected = [tuple(reference.encode(text, add_special_tokens=False).ids) for text in texts]
    assert tokenizer.encode_texts(texts) == expected
    assert [tokenizer.tokenize(TokenizeRequest(text=text)).token_ids for text in texts] == expected
    assert [tokenizer.count(text) for text in texts] == [len(ids) for ids in expected]


@pytest.mark.parametrize("kind", KEEPING)
def test_no_token_holds_more_of_a_text_than_the_bound(kind: str) -> None:
    tokenizer = made(KEEPING[kind])
    assert tokenizer.chars_per_token is not None
    for text in random_texts(seed=11, count=500):
        assert tokenizer.count(text) * tokenizer.chars_per_token >= len(text), text


@pytest.mark.parametrize("kind", DELETING)
def test_a_tokenizer_that_may_delete_text_sets_no_bound(kind: str) -> None:
    assert made(DELETING[kind]).chars_per_token is None


def test_other_threads_run_while_a_long_text_is_cut() -> None:
    tokenizer = made(KEEPING["demo"])
    text = "Once upon a time there was a fox. " * 60_000
    ticks, is_over = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not is_over.wait(0.0005):
            ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    before = ticks
    tokenizer.count(text)
    during = ticks - before
    is_over.set()
    ticker.join()
    assert during > 5
