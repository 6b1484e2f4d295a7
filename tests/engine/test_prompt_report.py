"""What is echoed of a prompt, and where its tokens stand in that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.core.delta import PromptReport, TokenLogprob
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest, LogprobParams
from serve_app.engine.sampling.output import PromptReporter
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.text.tokenizer import TextTokenizer
from tests.engine.conftest import DEMO, SHARED_MODELS
from tests.engine.harness import request

STORIES = SHARED_MODELS / "stories260K"
LEAD, COLON, END, USER = 168, 31, 5, 373
"""A byte that begins a character of three bytes, `:`, `<|im_end|>` and `user`."""


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(DEMO, vocab_size=2048)


def echoing(*parts: str | tuple[int, ...], **what: object) -> GenerationRequest:
    asked = request("a", max_tokens=0, echo=True, logprobs=LogprobParams(prompt=True))
    return replace(asked, prompt=Prompt(parts=parts), **what)  # type: ignore[arg-type]


def report(tokenizer: TextTokenizer, asked: GenerationRequest, shown: range | None = None) -> PromptReport:
    """What is said of a prompt whose tokens were scored."""
    ids = tokenizer.encode(asked.prompt)
    one = Sequence(asked, ids, sample=0, max_tokens=0, detokenizer=tokenizer.detokenizer(ids), shown_prompt=shown)
    one.shown.prompt_logprobs = [
        TokenLogprob(token_id=id_, text=tokenizer.token_text(id_), logprob=-1.0, offset=0) for id_ in ids[1:]
    ]
    said = PromptReporter(tokenizer).report(one)
    assert said is not None
    return said


def offsets(said: PromptReport) -> list[int]:
    assert said.logprobs is not None
    return [entry.offset for entry in said.logprobs]


def test_what_breaks_a_character_stands_behind_the_sign_for_it(tokenizer: TextTokenizer) -> None:
    said = report(tokenizer, echoing((LEAD, COLON, LEAD, LEAD)))
    assert (said.text, offsets(said)) == ("\ufffd:\ufffd\ufffd", [0, 1, 2, 3])


@pytest.mark.parametrize("count", range(1, 10))
def test_offsets_count_from_where_the_echo_begins(tokenizer: TextTokenizer, count: int) -> None:
    whole = report(tokenizer, echoing("é😀é x"))
    said = report(tokenizer, echoing("é😀é x", echo_last=count))
    assert whole.text is not None
    assert said.text is not None
    assert whole.text.endswith(said.text)
    num_cut = len(whole.text) - len(said.text)
    assert offsets(said) == [max(0, place - num_cut) for place in offsets(whole)[-count:]]


def test_of_a_gap_offsets_count_in_what_is_shown_of_it(tokenizer: TextTokenizer) -> None:
    said = report(tokenizer, echoing((COLON, LEAD, COLON, COLON)), range(2, 4))
    assert (said.text, offsets(said)) == ("::", [0, 1])


def test_a_special_token_that_is_written_in_a_prompt_has_its_name_there(tokenizer: TextTokenizer) -> None:
    said = report(tokenizer, echoing("a <|im_end|> b c"))
    assert (said.text, offsets(said)) == ("a <|im_end|> b c", [0, 1, 2, 12, 14])
    last = report(tokenizer, echoing("a <|im_end|> b c", echo_last=4))
    assert (last.text, offsets(last)) == ("  b c", [0, 1, 1, 3])


def test_what_a_tokenizer_puts_before_a_text_is_not_looked_for_in_it() -> None:
    if not (STORIES / "tokenizer.json").is_file():
        pytest.skip("the tokenizer of stories260K is not here")
    stories = TextTokenizer.load(STORIES, vocab_size=512)
    said = report(stories, echoing("a <s> b"))
    assert said.logprobs is not None
    assert [entry.text for entry in said.logprobs] == ["<s>", " a", " ", "<s>", " ", " b"]
    assert (said.text, offsets(said)) == ("a <s> b", [0, 0, 1, 2, 5, 5])


@pytest.mark.parametrize(
    ("what", "text", "places"),
    [
        ({}, "user:user", [0, 0, 4, 5]),
        ({"skips_special_tokens": False}, "<|im_end|>user:user", [0, 10, 14, 15]),
        ({"skips_special_tokens": False, "echo_last": 3}, "user:user", [0, 4, 5]),
        ({"skips_special_tokens": False, "echo_last": 9}, "<|im_end|>user:user", [0, 10, 14, 15]),
    ],
)
def test_an_echo_of_tokens_shows_special_ones_where_they_are_not_skipped(
    tokenizer: TextTokenizer, what: dict[str, object], text: str, places: list[int]
) -> None:
    said = report(tokenizer, echoing((END, USER, COLON, USER), **what))
    assert (said.text, offsets(said)) == (text, places)


def test_a_special_token_that_is_shown_breaks_a_character(tokenizer: TextTokenizer) -> None:
    said = report(tokenizer, echoing((LEAD, END, COLON), skips_special_tokens=False))
    assert (said.text, offsets(said)) == ("\ufffd<|im_end|>:", [0, 1, 11])


@pytest.mark.parametrize("skips", [True, False])
def test_a_text_is_echoed_as_it_was_written_whatever_is_skipped(tokenizer: TextTokenizer, skips: bool) -> None:
    said = report(tokenizer, echoing("a <|im_end|> b", skips_special_tokens=skips))
    assert (said.text, offsets(said)) == ("a <|im_end|> b", [0, 1, 2, 12])
