"""Names of a request's members: misspelled ones, those of other systems and of clients, and those that are nobody's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.api.chat import CHAT_PARAMETERS
from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import DIALECTS
from serve_app.api.limits import DEFAULT_LIMITS
from serve_app.api.native import read_infill
from serve_app.api.parameters import CHANGES_NO_ANSWER, CHANGES_THE_ANSWER, PARAMETERS, Inert, NotYet
from serve_app.api.parse import CHAT, NATIVE, read_request
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from tests.parsing import parse_completion


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


FRONT_END = {  # what a common front end sends with every request, whatever stands behind it
    "max_new_tokens": 300, "max_tokens": 300, "n_predict": 300, "num_predict": 300, "logprobs": 10, "n_probs": 10,
    "temperature": 0.7, "top_p": 0.5, "typical_p": 1, "typical": 1, "seed": -1, "sampler_seed": -1, "min_p": 0,
    "repetition_penalty": 1.2, "repeat_penalty": 1.2, "rep_pen": 1.2, "frequency_penalty": 0, "presence_penalty": 0,
    "repeat_last_n": 0, "rep_pen_range": 0, "repetition_penalty_range": 0, "top_k": 40, "skew": 0, "min_tokens": 0,
    "min_length": 0, "length_penalty": 1, "early_stopping": False, "add_bos_token": True, "smoothing_factor": 0,
    "smoothing_curve": 1, "dry_allowed_length": 2, "dry_multiplier": 0.8, "dry_base": 1.75, "dry_penalty_last_n": 0,
    "dry_sequence_breakers": '["\\n", ":"]', "max_tokens_second": 0, "sampler_priority": ["dry"], "tfs": 1, "tfs_z": 1,
    "stopping_strings": ["\nUser:"], "stop": ["\nUser:"], "truncation_length": 8192, "num_ctx": 8192, "top_a": 0,
    "ban_eos_token": True, "ignore_eos": True, "skip_special_tokens": True, "mirostat_mode": 0, "mirostat": 0,
    "mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "7", "banned_strings": [], "api_type": "llamacpp",
    "api_server": "http://127.0.0.1", "xtc_threshold": 0.1, "xtc_probability": 0, "nsigma": 0, "top_n_sigma": 0,
    "min_keep": 0, "dynamic_temperature": True, "dynatemp_low": 0.5, "dynatemp_high": 1, "dynatemp_range": 0.25,
    "dynatemp_exponent": 1, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1, "penalty_alpha": 0,
    "temperature_last": True, "do_sample": True, "num_beams": 1, "guidance_scale": 1, "negative_prompt": "",
    "grammar_string": "", "grammar": "", "guided_json": None, "store": False, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "include_reasoning": True, "adaptive_target": -0.01, "adaptive_decay": 0.9, "logit_bias": [[7, False]],
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "tfs_z", "top_p", "min_p", "adaptive_p", "xtc",
                 "temperature"],
    "cache_prompt": True, "speculative_ngram": False, "legacy_api": False,
}  # fmt: skip


@pytest.mark.parametrize("dialect", ["union", "llama.cpp", "vllm"])
def test_the_body_of_a_common_front_end_is_taken(dialect: str) -> None:
    request = parse(dialect, **FRONT_END)
    assert (request.stop, request.max_tokens, request.logprobs, request.dry_sequence_breakers) == (
        ("\nUser:",), 300, 10, ("\n", ":"),
    )  # fmt: skip
    assert set(request.ignored_parameters) == {
        "max_new_tokens", "sampler_seed", "smoothing_curve", "max_tokens_second", "sampler_priority",
        "stopping_strings", "truncation_length", "num_ctx", "api_type", "api_server", "dynatemp_low", "dynatemp_high",
        "rep_pen", "rep_pen_range", "do_sample", "include_reasoning", "adaptive_target", "adaptive_decay",
        "samplers.tfs_z", "samplers.adaptive_p", "ban_eos_token", "custom_token_bans", "dynamic_temperature",
        "speculative_ngram", "legacy_api",
    }  # fmt: skip


def test_the_order_of_temperature_is_the_clients_where_it_says_so() -> None:
    assert parse(temperature_last=True).samplers_in_order[-1] == "temperature"
    assert parse("llama.cpp", temperature_last=False).samplers_in_order[-1] != "temperature"


EDITORS_GAP = {  # what editors send for a completion in a file
    "id_slot": 0, "input_prefix": "def f(x):\n", "input_suffix": "\n", "prompt": "    ", "n_predict": 128, "stop": [],
    "input_extra": [{"text": "import os", "time": [5, 7], "filename": "a.py"}, {"text": "", "time": 1.5}],
    "n_indent": 4, "n_cmpl": 1, "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"], "stream": False,
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
}  # fmt: skip


@pytest.mark.parametrize("dialect", ["union", "llama.cpp"])
def test_an_editors_completion_in_a_file_is_carried_out_but_for_what_changes_no_answer(dialect: str) -> None:
    request = read_infill(EDITORS_GAP, DEFAULT_LIMITS, DIALECTS[dialect], model=lambda: "tiny")
    assert (request.t_max_predict_ms, request.n_indent, request.samplers) == (1000, 4, ("top_k", "top_p"))
    assert request.response_fields == ("content", "timings/prompt_n", "truncated", "tokens_cached")
    assert set(request.ignored_parameters) == {"id_slot", "input_extra.time", "t_max_prompt_ms", "samplers.infill"}
    warm_up = {"n_predict": 0, "samplers": [], "t_max_predict_ms": 1, "response_fields": [""], "id_slot": 3}
    request = read_infill(EDITORS_GAP | warm_up, DEFAULT_LIMITS, DIALECTS[dialect], model=lambda: "tiny")
    assert (request.max_tokens, request.samplers, request.response_fields) == (0, (), ("",))


MESSAGES = [{"role": "user", "content": "hi"}]
CHATS: dict[str, dict[str, Any]] = {  # what editors and agents send beside `messages`, by kind
    "an edit without a model": {"stream": False, "cache_prompt": True, "temperature": 0.8, "top_p": 0.95},
    "an editor's warm-up": {
        "id_slot": 2, "samplers": [], "n_predict": 0, "stream": False, "cache_prompt": True, "response_fields": [""],
    },
    "an editor's instruction": {"id_slot": 2, "min_p": 0.1, "samplers": ["min_p", "temperature"], "stream": True},
    "an agent of an editor": {
        "model": "tiny", "stream": True, "max_completion_tokens": 32000, "stop": [], "temperature": 1.0, "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": False, "prompt_cache_key": "thread 7",
        "stream_options": {"include_usage": True}, "reasoning_effort": "medium",
    },
    "an agent in a terminal": {
        "model": "tiny", "stream": True, "max_tokens": 32000, "top_p": 1, "temperature": 0, "store": False,
        "stream_options": {"include_usage": True}, "verbosity": "low", "tool_choice": "none",
        "prompt_cache_key": "ses_1",
        "chat_template_args": {"enable_thinking": True}, "reasoning_effort": "high",
    },
    "a whole request dumped": {
        "model": "tiny", "n": 1, "logprobs": False, "top_logprobs": 0, "frequency_penalty": 0, "presence_penalty": 0,
        "logit_bias": {}, "seed": None, "stop": None, "user": "u-1", "modalities": ["text"], "metadata": {"run": "5"},
        "service_tier": "flex", "safety_identifier": "u-1", "store": True, "prediction": None, "audio": None,
        "prompt_cache_retention": "24h", "tools": None, "tool_choice": None, "functions": [], "function_call": "auto",
        "response_format": {"type": "text"}, "web_search_options": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("dialect", list(DIALECTS))
@pytest.mark.parametrize("sent", CHATS.values(), ids=CHATS)
def test_chats_of_editors_and_agents_are_taken_in_every_dialect(sent: dict[str, Any], dialect: str) -> None:
    spoken = DIALECTS[dialect]
    if sent.get("n_predict") == 0 and not spoken.takes_zero_tokens:
        sent = sent | {"n_predict": 1}
    request = read_request(CHAT, {"messages": MESSAGES, **sent}, DEFAULT_LIMITS, dialect=spoken)
    hints = {name for name in sent if isinstance(CHAT_PARAMETERS[name], Inert) and sent[name] not in (False, None)}
    assert set(request.ignored_parameters) == hints


def test_every_parameter_that_is_not_carried_out_is_of_one_class() -> None:
    """What changes an answer is refused by name; what changes none is told as ignored."""
    assert not set(CHANGES_THE_ANSWER) & set(CHANGES_NO_ANSWER)
    classes = {NotYet: set(CHANGES_THE_ANSWER), Inert: set(CHANGES_NO_ANSWER)}
    for kind, names in classes.items():
        assert {name for name, each in PARAMETERS.items() if isinstance(each, kind)} == names


HINTS = {
    "prompt_cache_key": "s1", "metadata": {"trace": "7"}, "store": True, "service_tier": "priority", "rid": "r",
    "session_id": "s", "safety_identifier": "u1", "return_progress": True, "prompt_cache_retention": "24h",
    "verbosity": "high", "reasoning_effort": "low", "priority": 7,
}  # fmt: skip


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_a_hint_changes_nothing_but_what_is_told(dialect: str) -> None:
    request = parse(dialect, **HINTS)
    assert request.ignored_parameters == tuple(HINTS)
    assert request.model_copy(update={"ignored_parameters": ()}) == parse(dialect)
    native = read_request(NATIVE, {"model": "tiny", "prompt": "a", **HINTS}, DEFAULT_LIMITS, dialect=DIALECTS[dialect])
    assert native.ignored_parameters == tuple(HINTS)


@pytest.mark.parametrize("name", ["max_length", "models", "top_nsigma", "num_predict", "dry_sequence_breaker_ids"])
def test_names_that_clients_send_are_no_misspelled_ones(name: str) -> None:
    parse(**{name: 5})


@pytest.mark.parametrize(
    "members", [{"guided_choice": []}, {"structured_outputs": {"choice": []}}, {"allowed_token_ids": []}]
)
@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_an_empty_list_of_what_is_allowed_is_refused(members: dict[str, Any], dialect: str) -> None:
    (name,) = members
    assert str(refusal(dialect, **members).param).startswith(name)


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_as_many_probabilities_as_llama_cpp_gives_may_be_asked_for_by_its_name(dialect: str) -> None:
    assert parse(dialect, n_probs=50).logprobs == 50
    assert parse(dialect, n_probs=50, logprobs=50).logprobs == 50
    assert refusal(dialect, logprobs=50).param == "logprobs"


@pytest.mark.parametrize(("dialect", "is_taken"), [("fireworks", False), ("sglang", False), ("union", True)])
def test_a_repetition_penalty_is_bounded_where_the_system_bounds_it(dialect: str, is_taken: bool) -> None:
    if is_taken:
        assert parse(dialect, repetition_penalty=2.5).repetition_penalty == 2.5
    else:
        assert "from 0 to 2" in refusal(dialect, repeat_penalty=2.5).message
    assert parse(dialect, repetition_penalty=2).repetition_penalty == 2


def test_obfuscation_may_be_declined_and_is_told_as_ignored_where_it_is_asked_for() -> None:
    options = {"include_usage": True, "include_obfuscation": False}
    assert parse(stream=True, stream_options=options).ignored_parameters == ()
    asked = parse("openai", stream=True, stream_options={"include_obfuscation": True})
    assert asked.ignored_parameters == ("stream_options.include_obfuscation",)


def test_an_unknown_stream_option_is_named_with_its_path() -> None:
    error = refusal(stream_options={"include_usag": True})
    assert error.param == "stream_options.include_usag"
    assert '"stream_options.include_usage"' in error.message
