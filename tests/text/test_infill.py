"""Gaps in tokens: whose markers are found, in which order the parts stand, and what gives way."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from serve_app.core.cards import TokenizerCard
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import ExtraFile, Infill, Prompt
from serve_app.text.fast_tokenizer import NAMES, Markers
from serve_app.text.infill import Gap, arrange
from serve_app.text.tokenizer import TextTokenizer

KINDS = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"),
    "codegemma": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", None, "<|file_separator|>", None),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<filename>", "<fim_pad>"),
    "starcoder2": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>", "<fim_pad>"),
    "santacoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", None, None, "<fim-pad>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>", None, None, "▁<EOT>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", None, None, "<|EOT|>"),
    "glm": ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", None, None, None),
    "named": ("[[before]]", "[[behind]]", "[[between]]", None, None, None),
}
"""The markers of each kind of models: prefix, suffix, middle, repository, separator, end."""
LETTERS = {letter: at for at, letter in enumerate("abcdefgh\n-_. inmpyrojectlsfa")}


def letters(*markers: str | None, card: TokenizerCard | None = None, vocab_size: int = 200) -> TextTokenizer:
    """A token per letter, and these tokens from id 100 on in their order."""
    vocabulary = {letter: at for at, letter in enumerate(sorted(LETTERS))}
    vocabulary |= {f"unused{at}": at for at in range(len(vocabulary), 100)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in markers if each is not None])
    tokenizer.decoder = decoders.Fuse()
    return TextTokenizer(tokenizer, vocab_size=vocab_size, card=card)


def ids(tokenizer: TextTokenizer, text: str) -> list[int]:
    return list(tokenizer.encode_literal(text))


def gap(tokenizer: TextTokenizer, prefix: str = "ab", suffix: str = "cd", **others: object) -> Gap:
    return arrange(tokenizer, Prompt(parts=(prefix,)), Infill(suffix=suffix, **others))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_the_markers_of_each_kind_are_found(kind: str) -> None:
    names = KINDS[kind]
    named = TokenizerCard(special_tokens=tuple(zip(NAMES, names[:3], strict=True)))  # type: ignore[arg-type]
    tokenizer = letters(*names, card=named if kind == "named" else None)
    present = {name: 100 + at for at, name in enumerate(name for name in names if name is not None)}
    prefix, suffix, middle, repository, separator, end = (present.get(name or "") for name in names)
    assert prefix is not None
    assert suffix is not None
    assert middle is not None
    assert tokenizer.markers == Markers(
        prefix=prefix,
        suffix=suffix,
        middle=middle,
        repository=repository,
        separator=separator,
        ends=tuple(each for each in (repository, separator, end) if each is not None),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", range(3))
def test_without_one_of_the_three_there_are_none(kind: str, missing: int) -> None:
    names = [name for at, name in enumerate(KINDS[kind]) if at != missing]
    assert letters(*names).markers is None


def test_markers_that_the_model_has_no_room_for_are_none() -> None:
    assert letters(*KINDS["qwen"], vocab_size=103).markers is not None
    assert letters(*KINDS["qwen"], vocab_size=102).markers is None


def test_the_demo_model_has_markers(demo: TextTokenizer) -> None:
    assert demo.markers == Markers(prefix=1, suffix=2, middle=3)


def test_a_gap_stands_behind_prefix_and_suffix() -> None:
    tokenizer = letters(*KINDS["qwen"])
    assert gap(tokenizer).token_ids == [100, *ids(tokenizer, "ab"), 101, *ids(tokenizer, "cd"), 102]
    assert gap(tokenizer, opening="e").token_ids[-2:] == [102, *ids(tokenizer, "e")]
    assert gap(tokenizer, prefix="", suffix="").token_ids == [100, 101, 102]
    assert gap(tokenizer).shown == range(1, 3)


FILES = (ExtraFile(name="a.b", text="ee"), ExtraFile(name="c.d", text="ff"))


def test_files_stand_in_front_in_the_order_of_a_repository() -> None:
    tokenizer = letters(*KINDS["qwen"])
    arranged = gap(tokenizer, files=FILES)
    expected = [
        103, *ids(tokenizer, "myproject\n"),
        104, *ids(tokenizer, "a.b\nee"), 104, *ids(tokenizer, "c.d\nff"), 104, *ids(tokenizer, "filename\n"),
        *gap(tokenizer).token_ids,
    ]  # fmt: skip
    assert arranged.token_ids == expected
    assert [arranged.token_ids[place] for place in arranged.shown] == ids(tokenizer, "ab")


def test_files_of_a_model_without_separators_are_snippets() -> None:
    tokenizer = letters(*KINDS["santacoder"])
    snippet = ids(tokenizer, "\n\n--- snippet ---\n\n")
    files = [*snippet, *ids(tokenizer, "ee"), *snippet, *ids(tokenizer, "ff")]
    assert gap(tokenizer, files=FILES).token_ids == [*files, *gap(tokenizer).token_ids]


def test_names_of_special_tokens_in_a_file_are_text(demo: TextTokenizer) -> None:
    text = "a<|fim_middle|>b<|endoftext|>"
    arranged = arrange(
        demo, Prompt(parts=(text,)), Infill(suffix=text, opening=text, files=(ExtraFile(name=text, text=text),))
    )
    assert [token_id for token_id in arranged.token_ids if token_id in demo.special_ids] == [1, 2, 3]
    assert demo.decode(arranged.prefix) == text


def test_token_ids_stand_as_they_are_and_those_out_of_the_vocabulary_are_refused(demo: TextTokenizer) -> None:
    arranged = arrange(demo, Prompt(parts=((7, 3), "a", (9,))), Infill(suffix="b"))
    assert arranged.token_ids == [1, 7, 3, *demo.encode_literal("a"), 9, 2, *demo.encode_literal("b"), 3]
    with pytest.raises(InvalidRequest, match="found 2048"):
        arrange(demo, Prompt(parts=((2048,),)), Infill(suffix="b"))


def test_a_space_that_is_thought_before_every_text_is_not_before_a_suffix() -> None:
    """As in Code Llama, whose tokenizer is of this kind."""
    vocabulary = {letter: at for at, letter in enumerate("▁abcd")} | {"<0x0A>": 5, "▁c": 6, "cd": 7}
    inner = Tokenizer(models.BPE(vocabulary, [("▁", "c"), ("c", "d")], byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"])
    tokenizer = TextTokenizer(inner, vocab_size=20)
    assert tokenizer.encode_literal("cd") == (6, 4)
    arranged = gap(tokenizer, "ab", "cd")
    assert arranged.token_ids == [8, 0, 1, 2, 9, 7, 10]
    assert arranged.markers.ends == (11,)


def test_of_a_sentencepiece_tokenizer_the_same(stories: TextTokenizer) -> None:
    assert stories.decode(stories.encode_literal("upon a time")) == "upon a time"
    inside = stories.encode_inside("upon a time")
    assert inside != stories.encode_literal("upon a time")
    assert stories.untokenize((*stories.encode_literal("Once"), *inside)) == "Onceupon a time"
    assert stories.encode_inside("") == ()


@pytest.mark.parametrize(
    ("room", "num_prefix", "num_suffix"),
    [(100, 40, 40), (83, 40, 40), (82, 40, 39), (57, 40, 14), (43, 30, 10), (23, 15, 5), (3, 0, 0), (1, 0, 0)],
)
def test_prefix_and_suffix_give_way_three_to_one(room: int, num_prefix: int, num_suffix: int) -> None:
    tokenizer = letters(*KINDS["qwen"])
    prefix, suffix = "abcdefgh" * 5, "hgfedcba" * 5
    fitted = gap(tokenizer, prefix, suffix).fitted(room)
    assert fitted.prefix == tokenizer.encode_literal(prefix)[40 - num_prefix :]
    assert fitted.suffix == tokenizer.encode_literal(suffix)[:num_suffix]
    assert len(fitted.token_ids) == min(83, max(3, room))


def test_what_one_side_leaves_is_the_others() -> None:
    tokenizer = letters(*KINDS["qwen"])
    assert len(gap(tokenizer, "ab", "c" * 40).fitted(23).suffix) == 18
    assert len(gap(tokenizer, "a" * 40, "c").fitted(23).prefix) == 19


def test_files_give_way_first_and_the_first_of_them_before_the_last() -> None:
    tokenizer = letters(*KINDS["qwen"])
    whole = gap(tokenizer, files=FILES)
    fitted = whole.fitted(len(whole.token_ids) - 5)
    assert (fitted.prefix, fitted.suffix) == (whole.prefix, whole.suffix)
    assert fitted.files == whole.files[5:]
    assert whole.fitted(7).files == ()
