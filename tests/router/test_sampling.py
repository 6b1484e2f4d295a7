"""Sampling parameters of the wire become the engine's, as the dialect means them."""

from __future__ import annotations

import json

import pytest

from serve_app.api.dialects import DIALECTS
from serve_app.core.errors import InvalidRequest
from serve_app.core.request import TEMPERATURE_FIRST, TEMPERATURE_LAST, DryParams, SamplingParams
from serve_app.router.lower import WHOLE_CONTEXT, lower_sampling, unencoded
from tests.parsing import parse_completion


def request_of(dialect: str = "union", **members: object):
    body = json.dumps({"model": "tiny", "prompt": "Hello", "seed": 1, **members}).encode()
    return parse_completion(body, choose_dialect=lambda model: DIALECTS[dialect])


def lowered(dialect: str = "union", **members: object) -> SamplingParams:
    return lower_sampling(request_of(dialect, **members), vocab_size=100)


def test_a_request_without_options_switches_nothing_on():
    assert lowered() == SamplingParams(seed=1)


@pytest.mark.parametrize(
    ("members", "fields"),
    [
        ({"typical_p": 0.5}, {"typical_p": 0.5}),
        ({"top_n_sigma": -1}, {"top_n_sigma": 0.0}),
        ({"top_n_sigma": 2}, {"top_n_sigma": 2.0}),
        ({"min_keep": 2}, {"min_keep": 2}),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, {"xtc_probability": 0.5, "xtc_threshold": 0.2}),
        ({"dynatemp_range": 0.5}, {"dynamic_temperature_range": 0.5}),
        ({"dynatemp_exponent": 2}, {"dynamic_temperature_exponent": 2.0}),
        ({"mirostat": 1, "mirostat_tau": 3}, {"mirostat": 1, "mirostat_tau": 3.0}),
        ({"mirostat_target": 3, "mirostat_lr": 0.2}, {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2}),
        ({"mirostat_lr": 0.2}, {"mirostat": 0, "mirostat_eta": 0.2}),
        ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2, "penalty_window": None}),
        ({"presence_penalty": 1, "repeat_last_n": 9}, {"presence_penalty": 1.0, "penalty_window": 9}),
        ({"frequency_penalty": 1, "repeat_last_n": 0}, {"frequency_penalty": 1.0, "penalty_window": 0}),
        ({"repeat_last_n": -1}, {"penalty_window": WHOLE_CONTEXT}),
        ({"samplers": ["top_k", "temperature"]}, {"samplers": ("top_k", "temperature")}),
        ({"logit_bias": {"5": -100, "x": 3, "7": False}}, {"logit_bias": ((5, -100.0), (7, float("-inf")))}),
        ({"dry_multiplier": 0.8}, {"dry": DryParams(multiplier=0.8)}),
        ({"dry_multiplier": 0.8, "dry_base": 0.5}, {"dry": DryParams(multiplier=0.8, base=1.75)}),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 9}, {"dry": DryParams(multiplier=0.8, window=9)}),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 0}, {"dry": None}),
    ],
)
def test_a_parameter_arrives_in_the_engines_terms(members, fields):
    params = lowered(**members)
    assert {name: getattr(params, name) for name in fields} == fields


@pytest.mark.parametrize("dialect", DIALECTS)
def test_temperature_stands_where_the_dialect_has_it_unless_an_order_was_sent(dialect):
    is_last = DIALECTS[dialect].temperature_last
    assert lowered(dialect).samplers == (TEMPERATURE_LAST if is_last else TEMPERATURE_FIRST)
    assert lowered(dialect, samplers=["top_p"]).samplers == ("top_p",)


@pytest.mark.parametrize(
    ("dialect", "window", "sees_prompt"),
    [("union", None, True), ("llama.cpp", 64, True), ("omlx", None, False), ("sglang", None, False)],
)
def test_penalties_see_what_the_dialect_lets_them_see(dialect, window, sees_prompt):
    params = lowered(dialect)
    assert (params.penalty_window, params.repetition_sees_prompt) == (window, sees_prompt)


def test_texts_are_left_for_the_tokenizer():
    texts = unencoded(request_of(logit_bias=[["x", 1], [5, 2]], dry_multiplier=1, dry_sequence_breakers=["\n"]))
    assert (texts.logit_bias, texts.dry_breakers) == ((("x", 1.0),), ("\n",))
    assert unencoded(request_of()).dry_breakers == ()


@pytest.mark.parametrize("key", ["100", "-1", "9" * 18])
def test_a_biased_id_that_no_token_has_is_refused_or_in_llama_cpp_left_out(key):
    with pytest.raises(InvalidRequest, match="from 0 to 99") as caught:
        lowered(logit_bias={key: 1})
    assert caught.value.param == "logit_bias"
    assert lowered("llama.cpp", logit_bias={key: 1, "5": 1}).logit_bias == ((5, 1.0),)
