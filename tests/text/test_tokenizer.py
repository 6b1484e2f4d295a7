"""Prompts to token ids, tokens as they are shown, and tokenizers that are refused."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import CanineTokenizer

from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Prompt
from serve_app.text.detokenizer import UnsupportedTokenizer
from serve_app.text.tokenizer import TextTokenizer
from tests.text.conftest import FOLDERS

LETTERS = {"a": 0, "b": 1, "<s>": 2, "</s>": 3}


def small_tokenizer(*, decoder: Any = None, template: str | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(LETTERS, []))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoder or decoders.Fuse()
    if template is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 2), ("</s>", 3)]
        )
    return tokenizer


def text(*parts: str | tuple[int, ...]) -> Prompt:
    return Prompt(parts=parts)


def test_text_alone_is_encoded_as_the_library_does(tokenizer: TextTokenizer, reference: Any) -> None:
    for line in ("ABCCBA", "Once upon a time, there was", " two  spaces\n\nand lines "):
        expected = reference(line)["input_ids"]
        if expected:
            assert tokenizer.encode(text(line)) == expected


def test_only_a_leading_text_gets_the_bos(stories: TextTokenizer) -> None:
    once = stories.encode(text("Once"))
    assert once[0] == 1
    assert stories.encode(text("Once", (7, 8))) == [*once, 7, 8]
    assert stories.encode(text((7, 8), "Once")) == [7, 8, *once[1:]]
    assert stories.encode(text("Once", "Once")) == [*once, *once[1:]]
    assert stories.encode(text((1, 7))) == [1, 7]


def test_no_text_gets_the_bos_where_none_is_to_be_added(stories: TextTokenizer) -> None:
    once = stories.encode(text("Once"))
    assert stories.encode(Prompt(parts=("Once",), adds_special=False)) == once[1:]
    assert stories.encode(Prompt(parts=("Once", (7,)), adds_special=False)) == [*once[1:], 7]
    assert stories.encode(Prompt(parts=((1,), "Once"), adds_special=False)) == once


@pytest.mark.parametrize("has_spaces", [True, False])
def test_no_space_stands_between_special_tokens_whatever_is_asked_of_the_library(
    tokenizer: TextTokenizer, reference: Any, has_spaces: bool
) -> None:
    special = sorted(tokenizer.special_ids)[:2]
    ids = [*tokenizer.encode_text("a word"), *special, *special]
    names = "".join(map(tokenizer.token_text, special))
    shown = tokenizer.detokenizer([], shows_special=True)
    text_shown = "".join(map(shown.feed, ids))
    assert text_shown.endswith(names + names)
    assert reference.decode(ids, spaces_between_special_tokens=has_spaces).endswith(names + names)


def test_special_tokens_written_in_a_text_are_parsed(demo: TextTokenizer) -> None:
    ids = demo.encode(text("a<|endoftext|>b"))
    assert [id_ for id_ in ids if id_ in demo.special_ids] == [0]


def test_an_end_of_text_that_the_tokenizer_would_append_is_left_out() -> None:
    tokenizer = TextTokenizer(small_tokenizer(template="<s> $A </s>"), vocab_size=4)
    assert tokenizer.encode(text("ab")) == [2, 0, 1]
    assert TextTokenizer(small_tokenizer(template="$A </s>"), vocab_size=4).encode(text("ab")) == [0, 1]


@pytest.mark.parametrize("prompt", [text(""), text(()), text("", ""), text("", (), ""), text()])
def test_a_prompt_of_nothing_is_refused(stories: TextTokenizer, prompt: Prompt) -> None:
    with pytest.raises(InvalidRequest, match="must not be empty") as caught:
        stories.encode(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("token_id", [-1, 512, 10**12])
def test_ids_outside_the_models_vocabulary_are_refused_by_name_and_range(stories: TextTokenizer, token_id: int) -> None:
    with pytest.raises(InvalidRequest, match=f"from 0 to 511, .*found {token_id}"):
        stories.encode(text("Once", (token_id,)))


def test_text_with_tokens_that_the_model_lacks_is_refused() -> None:
    tokenizer = TextTokenizer(small_tokenizer(), vocab_size=1)
    assert tokenizer.encode(text("aa")) == [0, 0]
    with pytest.raises(InvalidRequest, match="token ids from 0 to 0, which are the model's vocabulary; found 1"):
        tokenizer.encode(text("ab"))


def test_half_a_surrogate_pair_is_refused_and_named(demo: TextTokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"U\+D83D. at character 2"):
        demo.encode(text("ab\ud83d"))


def test_many_threads_encode_as_one_does(demo: TextTokenizer) -> None:
    prompts = [text(f"prompt number {i} " * (i % 40 + 1)) for i in range(200)]
    alone = [demo.encode(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(demo.encode, prompts)) == alone


def test_tokens_are_shown_alone_with_their_space_by_name_by_bytes_or_by_id(stories: TextTokenizer) -> None:
    ids = stories.encode(text("Once upon"))
    assert "".join(stories.token_text(id_) for id_ in ids) == "<s> Once upon"
    assert stories.token_text(2) == "</s>"
    assert stories.token_text(3 + 0xE2) == r"bytes:\xe2"
    assert stories.token_text(3 + 0x0A) == "\n"
    assert stories.token_text(512) == "<id:512>"
    assert stories.token_text(-1) == "<id:-1>"


def test_a_byte_level_token_with_half_a_character_is_shown_by_its_bytes(demo: TextTokenizer) -> None:
    shown = [demo.token_text(id_) for id_ in demo.encode(text("€"))]
    assert all(one.startswith("bytes:\\x") for one in shown)
    assert bytes.fromhex("".join(one.removeprefix("bytes:").replace("\\x", "") for one in shown)) == "€".encode()


def test_added_tokens_of_a_byte_level_vocabulary_are_text_not_bytes() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("é", normalized=False)])
    assert TextTokenizer(tokenizer, vocab_size=2).decode([0, 1, 0]) == "aéa"


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (decoders.CTC(), "'CTC'"),
        (decoders.BPEDecoder(), "'BPEDecoder'"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), "across tokens"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "strips the end"),
    ],
)
def test_decoders_whose_text_depends_on_later_tokens_are_refused(decoder: Any, reason: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=reason):
        TextTokenizer(small_tokenizer(decoder=decoder), vocab_size=4)


def test_a_metaspace_decoder_gives_what_the_library_gives() -> None:
    inner = small_tokenizer(decoder=decoders.Metaspace())
    inner.add_tokens(["▁a", "▁▁"])
    tokenizer = TextTokenizer(inner, vocab_size=6)
    for ids in ([4, 4, 0], [5, 4], [0, 5, 1], [2, 4, 3, 4]):
        assert tokenizer.decode(ids) == inner.decode(ids)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        TextTokenizer.load(tmp_path, vocab_size=4)


@pytest.mark.slow
def test_a_slow_tokenizer_is_refused_with_what_to_do(tmp_path: Path) -> None:
    CanineTokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedTokenizer, match=r"CanineTokenizer is a slow one, whose kind has no tokenizer\.json"):
        TextTokenizer.load(tmp_path, vocab_size=4)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_many_texts_are_cut_by_the_thread_that_asks() -> None:
    script = """
import os, sys
from pathlib import Path
from serve_app.text.tokenizer import TextTokenizer
before = len(os.listdir("/proc/self/task"))
tokenizer = TextTokenizer.load(Path(sys.argv[1]), vocab_size=2048)
assert all(tokenizer.encode_texts([f"Once upon a time {number}" for number in range(200)]))
print(len(os.listdir("/proc/self/task")) - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(FOLDERS["demo"])], capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n"
