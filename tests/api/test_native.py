"""The body of /infill: a gap by llama.cpp's names, every parameter of a completion, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import DIALECTS, LLAMA_CPP
from serve_app.api.limits import WireLimits
from serve_app.api.native import read_infill
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.prompt import ExtraFile, Infill, Prompt

GAP = {"input_prefix": "def f():\n", "input_suffix": "    return x\n"}
LIMITS = WireLimits(max_prompt_chars=100, max_extra_files=2)


def read(dialect: str = "llama.cpp", **members: Any) -> CompletionRequest:
    return read_infill(GAP | members, LIMITS, DIALECTS[dialect], model=lambda: "the only one")


def refusal(**members: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(**members)
    return caught.value


def test_a_gap_is_a_prompt_with_what_stands_behind_it() -> None:
    request = read()
    assert request.model == "the only one"
    assert request.prompts == (Prompt(parts=("def f():\n",)),)
    assert request.gap == request.infill == Infill(suffix="    return x\n")
    assert request.dialect is LLAMA_CPP


def test_every_member_finds_its_place() -> None:
    files = [{"filename": "a.h", "text": "int a;"}, {"text": "b", "filename": None, "odd": None}]
    request = read(model="demo", prompt="    x =", input_extra=files, n_predict=5, temperature=0, stop=["\n"])
    extra = (ExtraFile(name="a.h", text="int a;"), ExtraFile(name="tmp", text="b"))
    assert request.gap == Infill(suffix="    return x\n", opening="    x =", files=extra)
    assert (request.model, request.max_tokens, request.temperature, request.stop) == ("demo", 5, 0, ("\n",))


def test_what_does_not_fit_is_cut_unless_that_is_refused() -> None:
    assert read().truncate_sequence
    assert read(truncate_sequence=None).truncate_sequence
    assert not read(truncate_sequence=False).truncate_sequence


def test_a_gap_may_be_at_either_end_and_its_opening_and_files_be_none() -> None:
    request = read(input_prefix="", input_suffix="", prompt=None, input_extra=[], suffix=None, suffix_mode=None)
    assert request.prompts == (Prompt(parts=("",)),)
    assert request.gap == Infill(suffix="")


@pytest.mark.parametrize(
    ("members", "param", "said"),
    [
        ({"input_prefix": None}, "input_prefix", "must be a string of at most 100 characters; found nothing"),
        ({"input_suffix": None}, "input_suffix", "found nothing"),
        ({"input_prefix": 5}, "input_prefix", "found 5"),
        ({"input_suffix": "x" * 101}, "input_suffix", "at most 100 characters"),
        ({"prompt": ["a"]}, "prompt", "must be a string"),
        ({"prompt": [1, 2]}, "prompt", "must be a string"),
        ({"input_extra": {}}, "input_extra", "must be a list of at most 2 objects"),
        ({"input_extra": [{"text": ""}] * 3}, "input_extra", "found 3 elements"),
        ({"input_extra": [{"text": "x" * 60}, {"text": "x" * 60}]}, "input_extra", "found 126 characters"),
        ({"input_extra": [{}]}, "input_extra[0]", 'an object with the string "text"'),
        ({"input_extra": [{"text": "a"}, {"filename": "ok"}]}, "input_extra[1]", "found"),
        ({"input_extra": [{"filename": 123, "text": "abc"}]}, "input_extra[0]", "found"),
        ({"input_extra": [{"filename": "a", "text": 456}]}, "input_extra[0]", "found"),
        ({"input_extra": ["a"]}, "input_extra[0]", "found"),
        ({"suffix": "x"}, "suffix", "must be absent at /infill"),
        ({"suffix_mode": "fim"}, "suffix_mode", "must be absent at /infill"),
        ({"temperature": 9}, "temperature", "must be a number"),
        ({"input_sufix": "x"}, "input_sufix", "must be the name of a parameter"),
    ],
)
def test_what_is_refused_is_named(members: dict[str, Any], param: str, said: str) -> None:
    error = refusal(**members)
    assert error.param == param
    assert said in error.message


def test_of_llama_cpps_own_shape_nothing_is_ranked() -> None:
    assert read(best_of=None).best_of is None
    assert isinstance(refusal(suffix="x"), UnsupportedParameter)
