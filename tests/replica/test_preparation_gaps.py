"""A gap's texts are bounded as a prompt's are, and what ends a gap is known of the model's kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer

from serve_app.core.errors import ContextOverflow
from serve_app.core.prompt import ExtraFile, Infill, Prompt
from serve_app.core.request import ContextParams, GenerationRequest, StopParams
from serve_app.replica.engine import PreparedRequest
from serve_app.replica.preparation import Preparation
from serve_app.text.tokenizer import TextTokenizer
from tests.engine.conftest import DEMO
from tests.engine.harness import request

CONTEXT = 64
PAD = "<|fim_pad|>"


def tokenizer() -> TextTokenizer:
    """The demo's, with a token that ends a gap."""
    inner = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    inner.add_special_tokens([AddedToken(PAD, special=True)])
    return TextTokenizer(inner, vocab_size=2049)


TOKENIZER = tokenizer()
PREPARATION = Preparation(TOKENIZER, model_name="toy", max_model_len=CONTEXT)


def asked(infill: Infill | None, prompt: str = "a", **changes: object) -> GenerationRequest:
    whole = replace(request("a", max_tokens=4), prompt=Prompt(parts=(prompt,)), infill=infill)
    return replace(whole, **changes)  # type: ignore[arg-type]


def prepared(wanted: GenerationRequest) -> PreparedRequest:
    PREPARATION.length.check(wanted)
    return PREPARATION.prepare(wanted)


@pytest.mark.parametrize(
    "infill",
    [
        Infill(suffix="x" * 4_000_000),
        Infill(suffix="", opening="x" * 4_000_000),
        Infill(suffix="", files=(ExtraFile(name="a", text="x" * 4_000_000),)),
        Infill(suffix="", files=(ExtraFile(name="x" * 4_000_000, text="a"),)),
    ],
)
def test_each_text_of_a_gap_is_bounded_before_it_is_cut(infill: Infill) -> None:
    for context in (ContextParams(), ContextParams(truncates_prompt=True)):
        with pytest.raises(ContextOverflow, match=r"has 400000[12] characters, of which at most"):
            PREPARATION.length.check(asked(infill, context=context))


def test_a_long_suffix_is_counted_from_its_beginning() -> None:
    with pytest.raises(ContextOverflow, match="of which 1024 alone are"):
        PREPARATION.prepare(asked(Infill(suffix="é x" * 3000)))


@pytest.mark.parametrize("ignores", [False, True])
def test_what_ends_a_gap_ends_it_unless_ends_are_ignored(ignores: bool) -> None:
    stop = StopParams(max_tokens=4, token_ids=(7,), ignore_eos=ignores)
    found = prepared(asked(Infill(suffix="b"), stop=stop))
    assert found.request.stop.token_ids == ((7,) if ignores else (7, 2048))
    assert prepared(asked(None, stop=stop)).request.stop.token_ids == (7,)


def test_the_prefix_is_what_is_shown_of_a_gap() -> None:
    found = prepared(asked(Infill(suffix=" b", files=(ExtraFile(name="a", text=" c"),)), prompt=" d e"))
    shown = [found.token_ids[place] for place in found.shown_prompt]
    assert TOKENIZER.decode(shown) == " d e"
    assert list(prepared(asked(None)).shown_prompt) == [0]


def test_markers_alone_may_be_too_many() -> None:
    wanted = asked(Infill(suffix="b", opening="x " * 80), context=ContextParams(truncates_prompt=True))
    with pytest.raises(ContextOverflow, match="exceeds the available context size"):
        prepared(wanted)
