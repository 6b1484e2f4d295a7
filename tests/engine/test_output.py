"""Where generated tokens stand in the text that is shown."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from serve_app.core.delta import Delta, FinishReason
from serve_app.core.request import Continued, GenerationRequest, LogprobParams, StopParams
from serve_app.engine.sampling.output import Output
from serve_app.engine.sampling.sampler import SampledSpan, Scored
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span
from serve_app.text.tokenizer import TextTokenizer
from tests.engine.conftest import DEMO
from tests.engine.harness import request

LEAD, COLON, DASH = 168, 31, 18
"""A byte that begins a character of three bytes, `:`, and `-`."""
ASKED = request("a", max_tokens=20, logprobs=LogprobParams(top=0))


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(DEMO, vocab_size=2048)


def given(
    tokenizer: TextTokenizer,
    asked: GenerationRequest,
    token_ids: list[int],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[Delta]:
    """What comes out where these tokens are drawn behind a prompt, one in each step, until it ends."""
    output = Output(tokenizer, frozenset(), clock=clock)
    one = Sequence(asked, [COLON], sample=0, max_tokens=20, detokenizer=tokenizer.detokenizer([COLON]))
    return committed(output, one, token_ids)


def committed(output: Output, one: Sequence, token_ids: list[int]) -> list[Delta]:
    deltas = []
    for token_id in token_ids:
        if not one.is_finished:
            span = Span(one, one.num_computed, one.num_missing, samples=True)
            drawn = SampledSpan(token_id=token_id, scored=Scored(token_id, -1.0, ()))
            deltas += output.commit(Batch((span,)), [drawn])
    return deltas


def shown(deltas: list[Delta]) -> tuple[str, list[tuple[int, int]]]:
    """The text, and each token whose score was shown with its offset."""
    entries = [(entry.token_id, entry.offset) for delta in deltas for entry in delta.logprobs]
    return "".join(delta.text for delta in deltas), entries


def test_what_breaks_a_character_stands_behind_the_sign_for_it(tokenizer: TextTokenizer) -> None:
    text, entries = shown(given(tokenizer, ASKED, [LEAD, COLON, LEAD, LEAD, COLON]))
    assert text == "\ufffd:\ufffd\ufffd:"
    assert entries == [(LEAD, 0), (COLON, 1), (LEAD, 2), (LEAD, 3), (COLON, 4)]


def test_an_entry_is_not_shown_before_the_text_of_its_token(tokenizer: TextTokenizer) -> None:
    asked = replace(ASKED, stop=replace(ASKED.stop, strings=(":!",)))
    deltas = given(tokenizer, asked, [LEAD, COLON, DASH])
    assert [delta.text for delta in deltas] == ["", "\ufffd", ":-"]
    assert [[entry.offset for entry in delta.logprobs] for delta in deltas] == [[], [0], [1, 2]]


@pytest.mark.parametrize(("limit_s", "count"), [(0.0, 6), (1.5, 5), (0.5, 2), (9.0, 6)])
def test_a_text_whose_time_is_over_ends_at_its_next_line_break(
    tokenizer: TextTokenizer, limit_s: float, count: int
) -> None:
    """The clock goes on by a second each time that it is asked: of the first token, and of each with a line break."""
    seconds = itertools.count(5)
    line = tokenizer.encode_text("\n")[-1]
    asked = replace(ASKED, stop=replace(ASKED.stop, max_predict_s=limit_s), logprobs=None)
    deltas = given(tokenizer, asked, [DASH, line, DASH, DASH, line, DASH], clock=lambda: float(next(seconds)))
    assert len(deltas) == count
    assert (deltas[-1].finish is not None) == (count < 6)
    if deltas[-1].finish is not None:
        assert deltas[-1].finish.reason is FinishReason.LENGTH


def test_the_time_of_a_text_that_was_begun_elsewhere_begins_behind_what_was_told(tokenizer: TextTokenizer) -> None:
    """Whoever moved it has taken off what was over, and no line break that was told is late."""
    seconds, line = itertools.count(5), tokenizer.encode_text("\n")[-1]
    stop = replace(ASKED.stop, max_predict_s=1.5).after(1.0)
    begun = Continued(token_ids=(DASH, line, line, line))
    asked = replace(ASKED, stop=stop, logprobs=None, continued=(begun,))
    output = Output(tokenizer, frozenset(), clock=lambda: float(next(seconds)))
    one = Sequence(asked, [COLON], sample=0, max_tokens=20, detokenizer=tokenizer.detokenizer([COLON]))
    output.go_on(one)
    assert not one.is_finished
    deltas = committed(output, one, [DASH, line, DASH])
    assert [delta.finish is not None for delta in deltas] == [False, True]
    assert StopParams().after(9.0) == StopParams()
    assert stop.after(9.0).max_predict_s > 0, "which would be no limit"


def test_a_stop_that_breaks_a_character_has_no_entry(tokenizer: TextTokenizer) -> None:
    asked = replace(ASKED, stop=replace(ASKED.stop, strings=(":",)))
    assert shown(given(tokenizer, asked, [LEAD, COLON])) == ("\ufffd", [(LEAD, 0)])


def test_a_token_that_ends_the_text_and_is_not_shown_breaks_no_character(tokenizer: TextTokenizer) -> None:
    asked = replace(ASKED, stop=replace(ASKED.stop, token_ids=(COLON,)))
    assert shown(given(tokenizer, asked, [DASH, LEAD, COLON])) == ("-", [(DASH, 0), (LEAD, 1), (COLON, 1)])
    kept = replace(asked, stop=replace(asked.stop, shows_string=True))
    assert shown(given(tokenizer, kept, [DASH, LEAD, COLON])) == ("-\ufffd:", [(DASH, 0), (LEAD, 1), (COLON, 2)])
