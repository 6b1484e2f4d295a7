"""What is done with a suffix follows from request, dialect and model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import DIALECTS
from serve_app.core.errors import InvalidRequest, NotSupported
from serve_app.core.prompt import Infill, SuffixMode
from serve_app.router.router import with_suffix_mode
from tests.fakes import model_card
from tests.parsing import parse_completion

PLAIN = model_card("plain")
FILLING = replace(PLAIN, name="filling", fills_gaps=True)
APPENDING = {"mistral.rs", "sglang"}


def request(dialect: str = "union", **members: object) -> CompletionRequest:
    body = json.dumps({"model": "plain", "prompt": "a", **members}).encode()
    return parse_completion(body, choose_dialect=lambda model: DIALECTS[dialect])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_usual_mode_is_the_dialects_as_far_as_the_model_can(dialect: str) -> None:
    asked = request(dialect, suffix="b")
    expected = SuffixMode.APPEND if dialect in APPENDING else SuffixMode.FIM
    assert with_suffix_mode(asked, FILLING).suffix_mode is expected
    assert with_suffix_mode(asked, PLAIN).suffix_mode is SuffixMode.APPEND


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("mode", ["fim", "append"])
def test_what_was_sent_beats_the_dialect(dialect: str, mode: str) -> None:
    settled = with_suffix_mode(request(dialect, suffix="b", suffix_mode=mode), FILLING)
    assert settled.suffix_mode == mode
    assert settled.infill == (Infill(suffix="b") if mode == "fim" else None)
    assert with_suffix_mode(settled, FILLING) == settled


@pytest.mark.parametrize("members", [{}, {"suffix": None}, {"suffix": ""}, {"suffix": "", "suffix_mode": "fim"}])
def test_no_suffix_is_nothing_to_decide(members: dict[str, object]) -> None:
    asked = request(**members)
    assert with_suffix_mode(asked, PLAIN) == asked
    assert asked.infill is None


def test_a_model_is_not_asked_for_what_it_cannot_do() -> None:
    message = '"suffix_mode" must be "append" or absent with plain, whose tokenizer has no tokens'
    with pytest.raises(InvalidRequest, match=message) as caught:
        with_suffix_mode(request(suffix="b", suffix_mode="fim"), PLAIN)
    assert caught.value.param == "suffix_mode"


def test_a_gap_alone_needs_a_model_that_fills_it() -> None:
    asked = request().model_copy(update={"gap": Infill(suffix="")})
    assert with_suffix_mode(asked, FILLING).infill == Infill(suffix="")
    with pytest.raises(NotSupported, match="plain fills no gaps") as caught:
        with_suffix_mode(asked, PLAIN)
    assert (caught.value.status, caught.value.type) == (501, "not_supported_error")
