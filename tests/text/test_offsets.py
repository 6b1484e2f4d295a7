"""Where tokens stand in what they mean and in what they were cut from, on real tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.prompt import Prompt
from serve_app.text.tokenizer import TextTokenizer, meant_places, written_places

pytestmark = pytest.mark.slow

TEXTS = st.text(st.sampled_from("ab .\né😀你<|s>"), max_size=8) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=8
)
law = settings(max_examples=200, deadline=None)


def cut(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.encode(Prompt(parts=(text,), adds_special=False))


def named(tokenizer: TextTokenizer, *texts: str) -> str:
    """The texts with the name of a special token that is not for unknown characters between each two."""
    return tokenizer.token_text(2).join(texts)


@law
@given(texts=st.lists(TEXTS, min_size=2, max_size=5))
def test_each_token_of_a_text_with_special_tokens_is_found_at_its_place(
    demo: TextTokenizer, stories: TextTokenizer, texts: list[str]
) -> None:
    for tokenizer in (demo, stories):
        written = named(tokenizer, *texts)
        token_ids = cut(tokenizer, written)
        places = written_places(tokenizer, written, token_ids)
        assert places == sorted(places)
        for token_id, place in zip(token_ids, places, strict=True):
            text = tokenizer.token_text(token_id)
            has_thought_space = not written.startswith(text, place) and text.startswith(" ")
            if not text.startswith("bytes:"):
                assert written.startswith(text[1:] if has_thought_space else text, place)


@law
@given(text=TEXTS.filter(bool))
def test_in_a_text_without_special_tokens_both_places_are_the_same(demo: TextTokenizer, text: str) -> None:
    token_ids = cut(demo, text)
    assert written_places(demo, text, token_ids) == meant_places(demo, token_ids)


@law
@given(ids=st.lists(st.integers(min_value=0, max_value=400), max_size=24))
def test_tokens_whose_special_ones_are_shown_are_found_at_their_places(demo: TextTokenizer, ids: list[int]) -> None:
    text, places = demo.untokenize(ids), meant_places(demo, ids, shows_special=True)
    assert places == sorted(places)
    assert all(place < len(text) for place in places)
    for token_id, place in zip(ids, places, strict=True):
        name = demo.token_text(token_id)
        assert name.startswith("bytes:") or text.startswith(name, place)


def test_a_space_that_was_thought_behind_a_special_token_is_not_counted(stories: TextTokenizer) -> None:
    written = named(stories, "a ", " b c")
    token_ids = cut(stories, written)
    assert [stories.token_text(token_id) for token_id in token_ids] == [" a", " ", "</s>", " ", " b", " c"]
    assert written_places(stories, written, token_ids) == [0, 1, 2, 6, 6, 8]


def test_white_space_that_a_special_token_took_along_is_counted(demo: TextTokenizer) -> None:
    special = min(demo.special_ids)
    name = demo.token_text(special)
    token_ids = [*cut(demo, "ab"), special, *cut(demo, "cd")]
    for before, behind in (("", "\n"), (" ", ""), ("  ", "\n\n")):
        written = f"ab{before}{name}{behind}cd"
        places = written_places(demo, written, token_ids)
        shown = [written[place:] for place in places[len(cut(demo, "ab")) :]]
        assert shown[0].startswith(name)
        assert shown[1] == "cd"


def test_a_special_token_that_is_not_written_has_no_text(demo: TextTokenizer) -> None:
    special = min(demo.special_ids)
    token_ids = [special, *cut(demo, "a"), special, special, *cut(demo, "b")]
    assert written_places(demo, "ab", token_ids) == [0, 0, 1, 1, 1]


def test_no_place_is_beyond_a_text_that_says_less_than_its_tokens(demo: TextTokenizer) -> None:
    assert written_places(demo, "e", cut(demo, "xyz")) == [
        min(1, place) for place in meant_places(demo, cut(demo, "xyz"))
    ]
