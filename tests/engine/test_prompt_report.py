"""What is echoed of a prompt, and where its tokens stand in that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.core.delta import PromptReport, TokenLogprob
from serve_app.core.request import GenerationRequest, LogprobParams, Prompt
from serve_app.engine.prompt_report import PromptReporter
from serve_app.engine.sequence import Sequence
from serve_app.text.tokenizer import TextTokenizer
from tests.engine.conftest import DEMO
from tests.engine.harness import request

LEAD, COLON = 168, 31
"""A byte that begins a character of three bytes, and `:`."""


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
    one.prompt_logprobs = [
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
