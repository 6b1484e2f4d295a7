"""Laws of incremental decoding, on real tokenizers and arbitrary tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.prompt import Prompt
from serve_app.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.slow

ANY_IDS = st.lists(st.integers(min_value=0, max_value=2100), max_size=24)
LOW_IDS = st.lists(st.integers(min_value=0, max_value=261), max_size=24)  # where byte tokens are
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
law = settings(max_examples=150, deadline=None)


def stream(tokenizer: TextTokenizer, ids: list[int], *, prompt_ids: list[int] | None = None) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt_ids or [])
    pieces = [detokenizer.feed(token_id) for token_id in ids]
    assert detokenizer.num_chars == len("".join(pieces))
    return pieces


@law
@given(ids=ANY_IDS | LOW_IDS)
def test_streamed_text_is_the_decoded_text_but_for_an_incomplete_last_character(
    tokenizer: TextTokenizer, ids: list[int]
) -> None:
    streamed, whole = "".join(stream(tokenizer, ids)), tokenizer.decode(ids)
    assert whole in (streamed, streamed + "\ufffd")


@law
@given(ids=ANY_IDS | LOW_IDS)
def test_decoded_text_is_the_librarys_wherever_the_bytes_are_valid(
    tokenizer: TextTokenizer, reference: Any, ids: list[int]
) -> None:
    expected = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = tokenizer.decode(ids)
    assert found == expected or "\ufffd" in expected


@law
@given(ids=ANY_IDS | LOW_IDS)
def test_byte_level_text_is_the_librarys_even_where_bytes_are_invalid(demo: TextTokenizer, ids: list[int]) -> None:
    assert demo.decode(ids) == demo._tokenizer.decode(ids, skip_special_tokens=True)


@law
@given(text=TEXTS)
def test_any_text_survives_encoding_and_streaming_with_tokenizers_that_know_all_bytes(
    demo: TextTokenizer, stories: TextTokenizer, text: str
) -> None:
    for tokenizer in (demo, stories):
        special = [id_ for id_ in tokenizer.special_ids if tokenizer.token_text(id_) in text]
        ids = tokenizer.encode(Prompt(parts=(text,)))
        streamed = "".join(stream(tokenizer, ids))
        assert special or streamed == text
        assert all(not 0xD800 <= ord(character) < 0xE000 for character in streamed)


@law
@given(ids=ANY_IDS | LOW_IDS, cut=st.integers(min_value=0, max_value=24))
def test_prompt_and_completion_join_to_the_text_of_both(tokenizer: TextTokenizer, ids: list[int], cut: int) -> None:
    prompt_ids, completion_ids = ids[:cut], ids[cut:]
    before = tokenizer.decode(prompt_ids)
    if before.endswith("\ufffd"):
        return  # the prompt ends within a character
    whole = tokenizer.decode(ids)
    joined = before + "".join(stream(tokenizer, completion_ids, prompt_ids=prompt_ids))
    assert whole in (joined, joined + "\ufffd")


@law
@given(ids=ANY_IDS | LOW_IDS)
def test_a_token_has_the_place_of_the_character_that_its_first_byte_is_of(
    tokenizer: TextTokenizer, ids: list[int]
) -> None:
    detokenizer, before = tokenizer.detokenizer([]), b""
    for token_id in ids:
        place = detokenizer.place_of(token_id)
        piece = tokenizer._pieces.middle(token_id)
        if piece is not None:
            piece = piece if before else tokenizer._pieces.first(token_id)
        if piece:
            assert place == len((before + piece[:1]).decode("utf-8", "replace")) - 1
        else:
            assert place == detokenizer.num_chars
        assert place == detokenizer.place_of(token_id), "asking changes nothing"
        detokenizer.feed(token_id)
        before += piece or b""


def test_what_breaks_a_character_stands_behind_the_sign_for_it(demo: TextTokenizer) -> None:
    detokenizer = demo.detokenizer([], shows_special=True)
    lead, colon, special = 168, 31, min(demo.special_ids)
    places = []
    for token_id in (lead, colon, lead, special, lead, lead):
        places.append(detokenizer.place_of(token_id))
        detokenizer.feed(token_id)
    behind = 4 + len(demo.token_text(special))
    assert places == [0, 1, 2, 3, behind - 1, behind]


def test_special_tokens_that_are_part_of_a_mark_are_shown_and_no_others(demo: TextTokenizer) -> None:
    shown, hidden = sorted(demo.special_ids)[:2]
    (detokenizer,) = demo.detokenizers([], 1, shown_marks=(f"{demo.token_text(shown)}assistant",))
    assert [detokenizer.feed(token_id) for token_id in (shown, hidden)] == [demo.token_text(shown), ""]


@pytest.mark.law("Whole text")
def test_no_part_of_a_character_is_shown_before_it_is_whole(demo: TextTokenizer, stories: TextTokenizer) -> None:
    for tokenizer in (demo, stories):
        ids = tokenizer.encode(Prompt(parts=("a🙂é你",)))
        shown = [piece for piece in stream(tokenizer, ids) if piece.strip("a ")]
        assert "".join(shown).lstrip("a ") == "🙂é你"
        assert not any("\ufffd" in piece for piece in shown)


def test_bytes_that_can_no_longer_be_a_character_are_shown_as_replacement_at_once(stories: TextTokenizer) -> None:
    first = _byte_ids(stories, b"\xe2\x80")
    letter = next(id_ for id_ in range(stories.vocab_size) if stories.token_text(id_) == "a")
    assert stream(stories, [*first, letter], prompt_ids=[letter]) == ["", "", "\ufffda"]


def test_bytes_held_at_the_end_are_dropped(stories: TextTokenizer) -> None:
    assert stream(stories, _byte_ids(stories, b"ok\xf0\x9f\x99")) == ["o", "k", "", "", ""]


def test_never_more_than_three_bytes_are_held(stories: TextTokenizer) -> None:
    [lead] = _byte_ids(stories, b"\xf0")
    shown = stream(stories, [lead] * 50)
    assert "".join(shown) == "\ufffd" * 49


def test_first_word_keeps_its_space_behind_a_prompt_and_loses_it_behind_none(stories: TextTokenizer) -> None:
    word = next(
        id_ for id_ in range(stories.vocab_size) if stories.token_text(id_).startswith(" ") and id_ not in range(259)
    )
    text = stories.token_text(word)
    assert stream(stories, [word], prompt_ids=stories.encode(Prompt(parts=("Once",))))[0] == text
    assert stream(stories, [word], prompt_ids=[1])[0] == text[1:]


def test_special_tokens_within_a_character_do_not_break_it(demo: TextTokenizer) -> None:
    ids = demo.encode(Prompt(parts=("€",)))
    assert len(ids) > 1, "the character must be spread over tokens for this test"
    special = min(demo.special_ids)
    mixed = [id_ for pair in ids for id_ in (special, pair)]
    assert "".join(stream(demo, mixed)) == "€"


def _byte_ids(tokenizer: TextTokenizer, data: bytes) -> list[int]:
    """Ids of the byte tokens of a sentencepiece vocabulary, which begin behind its three special tokens."""
    assert tokenizer._pieces.name(3) == "<0x00>"
    return [3 + byte for byte in data]
