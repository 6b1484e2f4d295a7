"""Names of a request's members: misspelled ones, those of other systems, and those that are nobody's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects.tables import DIALECTS
from serve_app.api.parse import parse_completion
from serve_app.core.errors import InvalidRequest, UnsupportedParameter


def parse(dialect: str = "union", **members: Any) -> CompletionRequest:
    body = json.dumps({"model": "tiny", "prompt": "Hello", **members}).encode()
    return parse_completion(body, choose_dialect=lambda model: DIALECTS[dialect])


def refusal(dialect: str = "union", **members: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(dialect, **members)
    return caught.value


@pytest.mark.parametrize(
    ("name", "near"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("promt", "prompt"), ("Stop", "stop")],
)
def test_a_misspelled_name_is_answered_with_the_nearest_known_one(name: str, near: str) -> None:
    error = refusal(**{name: 1})
    assert isinstance(error, UnsupportedParameter)
    assert error.param == name
    assert f'Did you mean "{near}"?' in error.message


@pytest.mark.parametrize(
    "name",
    [
        "TEMPERATURE",
        "topP",
        "maxTokens",
        "max-tokens",
        "mdoel",
        "max_tokenss",
        "presencePenalty",
        "N",
        "frequency_penality",
    ],
)
def test_a_name_that_looks_like_a_known_one_is_taken_for_a_mistake(name: str) -> None:
    assert 'Did you mean "' in refusal(**{name: 1}).message


def test_a_name_that_is_nobodys_is_ignored_and_told() -> None:
    request = parse(zzz=5, options={"num_ctx": 5}, id="x", absent=None)
    assert request.model_copy(update={"ignored_parameters": ()}) == parse()
    assert request.ignored_parameters == ("zzz", "options", "id")
    assert parse(stream_options={"odd": 1, "include_usage": True}).ignored_parameters == ("stream_options.odd",)


@pytest.mark.parametrize("dialect", ["openai", "fireworks"])
def test_strict_dialects_refuse_a_name_that_is_nobodys_unless_it_is_null(dialect: str) -> None:
    error = refusal(dialect, zzz=5)
    assert isinstance(error, UnsupportedParameter)
    assert error.param == "zzz"
    assert refusal(dialect, stream=True, stream_options={"odd": 1}).param == "stream_options.odd"
    assert parse(dialect, zzz=None) == parse(dialect)


def test_so_many_names_are_ignored_and_no_more() -> None:
    assert len(parse(**{f"{i:04}": 1 for i in range(100)}).ignored_parameters) == 100
    error = refusal(**{f"{i:04}": 1 for i in range(101)})
    assert (error.param, error.code) == ("0100", "unsupported_parameter")


def test_the_name_in_a_refusal_is_shortened() -> None:
    assert len(refusal("openai", **{"z" * 100_000: 1}).message) < 300


FRONT_END = {  # what a common front end sends with every request
    "max_new_tokens": 300, "logprobs": None, "temperature": 0.7, "top_p": 0.5, "typical_p": 1, "typical": 1,
    "sampler_seed": -1, "min_p": 0, "repetition_penalty": 1.2, "frequency_penalty": 0, "presence_penalty": 0,
    "top_k": 40, "skew": 0, "min_tokens": 0, "length_penalty": 1, "early_stopping": False, "add_bos_token": True,
    "smoothing_factor": 0, "smoothing_curve": 1, "dry_allowed_length": 2, "dry_multiplier": 0, "dry_base": 1.75,
    "dry_penalty_last_n": 0, "max_tokens_second": 0, "sampler_priority": ["dry"], "stopping_strings": ["\nUser:"],
    "stop": ["\nUser:"], "truncation_length": 8192, "ban_eos_token": False, "skip_special_tokens": True, "top_a": 0,
    "tfs": 1, "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "",
    "banned_strings": [], "api_type": "vllm", "api_server": "http://127.0.0.1", "xtc_threshold": 0.1,
    "xtc_probability": 0, "nsigma": 0, "min_keep": 0, "dynamic_temperature": False, "dynatemp_low": 1,
    "dynatemp_high": 1, "rep_pen": 1.2, "rep_pen_range": 0, "repetition_penalty_range": 0, "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1, "penalty_alpha": 0, "temperature_last": False, "do_sample": True,
    "num_beams": 1, "guidance_scale": 1, "negative_prompt": "", "grammar_string": "", "guided_json": None,
    "guided_regex": None, "store": False, "epsilon_cutoff": 0, "eta_cutoff": 0, "include_reasoning": True,
}  # fmt: skip


def test_the_body_of_a_common_front_end_is_taken() -> None:
    request = parse(**FRONT_END)
    assert request.stop == ("\nUser:",)
    assert set(request.ignored_parameters) == {
        "max_new_tokens", "sampler_seed", "smoothing_curve", "max_tokens_second", "sampler_priority",
        "stopping_strings", "truncation_length", "api_type", "api_server", "nsigma", "dynatemp_low", "dynatemp_high",
        "rep_pen", "rep_pen_range", "do_sample", "include_reasoning",
    }  # fmt: skip


def test_obfuscation_may_be_declined_and_not_asked_for() -> None:
    options = {"include_usage": True, "include_obfuscation": False}
    assert parse(stream=True, stream_options=options).ignored_parameters == ()
    error = refusal(stream=True, stream_options={"include_obfuscation": True})
    assert (error.param, error.code) == ("stream_options.include_obfuscation", "unsupported_parameter")


def test_an_unknown_stream_option_is_named_with_its_path() -> None:
    error = refusal(stream_options={"include_usag": True})
    assert error.param == "stream_options.include_usag"
    assert '"stream_options.include_usage"' in error.message
