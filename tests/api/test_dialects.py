"""The dialects are tables: the matrix of docs/contract.md#dialects row by row, and every parameter in every dialect."""

from __future__ import annotations

import json

import jsonschema
import pytest

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import (
    DIALECTS,
    BestOf,
    Dialect,
    ErrorShape,
    Suffix,
    dialect_named,
    error_body,
    error_status,
)
from serve_app.api.listings import dialects_body, effective_defaults
from serve_app.api.parameters import PARAMETERS, Carried, Inert, NotYet, Renamed
from serve_app.api.schemas import SCHEMAS
from serve_app.core.errors import AdapterNotFound, InvalidRequest, MalformedJson, ModelNotFound, Unavailable
from tests.parsing import parse_completion
from tests.pictures import sent

pytestmark = pytest.mark.law("Nothing in silence")

NAMES = ("union", "openai", "llama.cpp", "mistral.rs", "fireworks", "omlx", "sglang", "vllm")
MAX = 2**31 - 1

# What stands first holds in every dialect but those named behind it.
DEFAULTS = {  # of parameters that were not sent
    "max_tokens": (16, {"llama.cpp": -1, "mistral.rs": -1, "omlx": 32768}),
    "temperature": (1.0, {"llama.cpp": 0.8}),
    "top_p": (1.0, {"llama.cpp": 0.95, "omlx": 0.95}),
    "top_k": (0, {"llama.cpp": 40}),
    "min_p": (0.0, {"llama.cpp": 0.05}),
    "repetition_penalty": (1.0, {"llama.cpp": 1.1}),
    "repeat_last_n": (None, {"llama.cpp": 64}),
    "mirostat_tau": (5.0, {"fireworks": 1.5}),
    "mirostat_eta": (0.1, {}),
    "no_stop_trim": (False, {"fireworks": True}),
    "context_length_exceeded_behavior": ("truncate", {"openai": "error", "sglang": "error", "vllm": "error"}),
}
MEANINGS = {
    "repetition_sees_prompt": (True, {"omlx": False, "sglang": False}),
    "temperature_last": (False, {"llama.cpp": True, "omlx": True}),
    "max_stop_strings": (None, {"openai": 4, "fireworks": 4}),
    "takes_zero_tokens": (True, {"mistral.rs": False, "fireworks": False, "sglang": False}),
    "takes_unlimited_tokens": (False, {"union": True, "llama.cpp": True}),
    "max_logprobs": (5, {"mistral.rs": 20, "sglang": 20, "vllm": 20}),
    "max_n": (128, {}),
    "max_top_k": (MAX, {"fireworks": 128}),
    "max_repetition_penalty": (100, {"fireworks": 2, "sglang": 2}),
    "best_of": (BestOf.CANDIDATES, {"mistral.rs": BestOf.RETURNED}),
    "suffix": (Suffix.INFILL, {"mistral.rs": Suffix.APPEND, "sglang": Suffix.APPEND}),
    "takes_mixed_prompts": (
        True,
        {"openai": False, "fireworks": False, "omlx": False, "sglang": False, "vllm": False},
    ),
    "stream_options_need_stream": (False, {"openai": True, "vllm": True}),
    "continuous_usage_needs_usage": (False, {"openai": True, "vllm": True}),
    "has_stop_reason": (False, {"vllm": True}),
    "chunks_have_null_usage": (False, {"openai": True}),
    "finish_chunk_has_usage": (False, {"llama.cpp": True, "fireworks": True}),
    "has_timings": (False, {"llama.cpp": True}),
    "ignores_unknown_bias": (False, {"llama.cpp": True}),
    "returns_last_state": (False, {"sglang": True}),
    "keeps_regex_match": (False, {"sglang": True}),
    "refuses_unknown": (False, {"openai": True, "fireworks": True}),
    "takes_any_model": (False, {"llama.cpp": True}),
    "takes_model_defaults": (False, {"union": True, "sglang": True, "vllm": True}),
    "default_model": (None, {"mistral.rs": "default"}),
    "precedence": ((), {"llama.cpp": ("n_predict", "max_completion_tokens", "max_tokens")}),
    "error_shape": (
        ErrorShape.NESTED,
        {
            "openai": ErrorShape.OPENAI,
            "mistral.rs": ErrorShape.MESSAGE,
            "sglang": ErrorShape.FLAT,
            "vllm": ErrorShape.VLLM,
        },
    ),
}
STATUSES = {
    InvalidRequest("no"): (400, {"mistral.rs": 422}),
    MalformedJson("no"): (400, {}),
    AdapterNotFound("no"): (404, {"mistral.rs": 422, "sglang": 400}),
    ModelNotFound("no"): (404, {}),
}

EVERY = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


def parse(dialect: Dialect, **members: object) -> CompletionRequest:
    body = json.dumps({"model": "tiny", "prompt": "Hello", **members}).encode()
    return parse_completion(body, choose_dialect=lambda model: dialect)


def refusal(dialect: Dialect, **members: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(dialect, **members)
    return caught.value


def cells(table: dict) -> list[tuple]:
    assert all(set(others) <= set(NAMES) for _, others in table.values())
    return [(name, row, others.get(name, usual)) for row, (usual, others) in table.items() for name in NAMES]


def test_the_dialects_are_those_of_the_contract():
    assert tuple(DIALECTS) == NAMES


@pytest.mark.parametrize(("name", "parameter", "value"), cells(DEFAULTS))
def test_a_parameter_that_was_not_sent_has_its_dialects_default(name, parameter, value):
    assert getattr(parse(DIALECTS[name]), parameter) == value


@EVERY
def test_a_dialect_changes_no_default_but_those_of_the_matrix(dialect):
    changed = parse(dialect).model_dump(exclude=set(DEFAULTS))
    assert changed == parse(DIALECTS["union"]).model_dump(exclude=set(DEFAULTS))


@pytest.mark.parametrize(("name", "meaning", "value"), cells(MEANINGS))
def test_a_contradictory_meaning_is_its_dialects_own(name, meaning, value):
    assert getattr(DIALECTS[name], meaning) == value


@pytest.mark.parametrize(("name", "error", "status"), cells(STATUSES))
def test_an_error_has_its_dialects_status(name, error, status):
    assert error_status(error, DIALECTS[name]) == status


SENT = {
    "max_tokens": 7,
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.2,
    "repetition_penalty": 1.3,
    "repeat_last_n": 9,
    "mirostat_tau": 2.0,
    "mirostat_eta": 0.3,
    "no_stop_trim": False,
    "context_length_exceeded_behavior": "truncate",
}


@EVERY
def test_what_was_sent_beats_every_default(dialect):
    request = parse(dialect, **SENT)
    assert {name: getattr(request, name) for name in SENT} == SENT


VALUES = {  # a value of each carried parameter that is not its default in any dialect
    **SENT,
    "model": "other", "prompt": "text", "lora_path": "sql", "lora": [{"id": 0, "scale": 0.5}],
    "adapter": "sql", "cache_prompt": False,
    "n": 2, "best_of": 1, "min_tokens": 1, "truncate_sequence": True, "seed": 5, "typical_p": 0.9,
    "top_n_sigma": 1.0, "min_keep": 2, "samplers": ["top_k"], "dynatemp_range": 0.1, "dynatemp_exponent": 2,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": 1}, "mirostat": 1, "dry_multiplier": 0.8,
    "dry_base": 2, "dry_allowed_length": 3, "dry_sequence_breakers": ["x"], "dry_penalty_last_n": 5,
    "xtc_probability": 0.5, "xtc_threshold": 0.2, "stop": ["END"], "stop_token_ids": [5], "stop_regex": ["a+"],
    "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "echo": True, "echo_last": 2,
    "logprobs": 2, "top_logprobs": 2, "post_sampling_probs": True, "skip_special_tokens": False,
    "return_token_ids": True, "return_cached_tokens_details": True, "timings_per_token": True,
    "response_format": {"type": "json_object"}, "grammar": "root ::= 'a'", "json_schema": {}, "regex": "a+",
    "ebnf": "root ::= 'a'", "guided_choice": ["a"], "structured_outputs": {"regex": "a+"}, "prompt_logprobs": 2,
    "allowed_token_ids": [5], "bad_words": ["x"], "add_special_tokens": False, "truncate_prompt_tokens": 9,
    "truncation_side": "right", "return_tokens_as_token_ids": True, "request_id": "mine", "cache_salt": "own",
    "suffix": "!", "suffix_mode": "append",
    "images": [sent(1)], "prediction": {"type": "content", "content": "a"}, "speculation": [5],
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto",
    "user": "someone", "temperature_last": True, "n_indent": 2, "t_max_predict_ms": 5,
    "parallel_tool_calls": True, "return_hidden_states": "last", "return_routed_experts": True,
}  # fmt: skip
COMPANIONS = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "post_sampling_probs": {"logprobs": 1},
    "best_of": {"n": 1},
    "mirostat_target": {"mirostat": 1},
    "images": {"prompt": "What is <image>?"},
}


def value_other_than_default(dialect: Dialect, name: str) -> object:
    disposition = PARAMETERS[name]
    canonical = disposition.to if isinstance(disposition, Renamed) else name
    match canonical:
        case "no_stop_trim":
            return not effective_defaults(dialect)[canonical]
        case "context_length_exceeded_behavior":
            return "error" if effective_defaults(dialect)[canonical] == "truncate" else "truncate"
        case _:
            return VALUES[canonical]


def test_every_carried_parameter_is_walked():
    assert {name for name, each in PARAMETERS.items() if isinstance(each, Carried)} == set(VALUES)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_every_parameter_has_one_disposition_in_every_dialect(name):
    companions = COMPANIONS.get(name, {})
    for dialect in DIALECTS.values():
        match PARAMETERS[name]:
            case Carried() | Renamed():
                request = parse(dialect, **{**companions, name: value_other_than_default(dialect, name)})
                assert request != parse(dialect, **companions), dialect.name
            case Inert():
                for value in ("something", 17, {"odd": [None]}):
                    request = parse(dialect, **{name: value})
                    assert request.ignored_parameters == (name,), dialect.name
                    assert request.model_copy(update={"ignored_parameters": ()}) == parse(dialect), dialect.name
            case NotYet():
                error = refusal(dialect, **{name: ["something", 17]})
                assert (error.param, PARAMETERS[name].instead in error.message) == (name, True), dialect.name


@EVERY
@pytest.mark.parametrize("value", [0, -1, -2])
def test_max_tokens_outside_of_the_dialects_range_is_refused_and_the_range_told(dialect, value):
    allowed = {0: dialect.takes_zero_tokens, -1: dialect.takes_unlimited_tokens, -2: False}[value]
    if allowed:
        assert parse(dialect, max_tokens=value).max_tokens == value
    else:
        assert f"an integer from {dialect.least_max_tokens} to {MAX}" in refusal(dialect, n_predict=value).message


@EVERY
def test_the_number_of_stop_strings_is_the_dialects(dialect):
    most = dialect.max_stop_strings
    many = [f"stop {number}" for number in range(5 if most is None else most + 1)]
    if most is None:
        assert parse(dialect, stop=many).stop == tuple(many)
    else:
        assert parse(dialect, stop=many[:most]).stop == tuple(many[:most])
        assert f"at most {most} strings" in refusal(dialect, stop=many).message


@EVERY
def test_the_number_of_logprobs_is_the_dialects(dialect):
    assert parse(dialect, logprobs=dialect.max_logprobs).logprobs == dialect.max_logprobs
    assert f"from 0 to {dialect.max_logprobs}" in refusal(dialect, logprobs=dialect.max_logprobs + 1).message


def test_top_k_is_bounded_in_fireworks_alone():
    assert "from -1 to 128" in refusal(DIALECTS["fireworks"], top_k=129).message
    assert parse(DIALECTS["union"], top_k=129).top_k == 129


@EVERY
def test_text_and_ids_in_one_prompt_are_taken_where_the_dialect_takes_them(dialect):
    if dialect.takes_mixed_prompts:
        assert parse(dialect, prompt=[12, "string"]).prompts[0].parts == ((12,), "string")
    else:
        assert refusal(dialect, prompt=[12, "string"]).param == "prompt"
        assert refusal(dialect, prompt=["a", [12, "string"]]).param == "prompt[1]"


@EVERY
def test_stream_options_without_a_stream_are_an_error_where_the_dialect_says_so(dialect):
    options = {"include_usage": True}
    if dialect.stream_options_need_stream:
        assert refusal(dialect, stream_options=options).param == "stream_options"
    else:
        assert parse(dialect, stream_options=options).stream_options.include_usage


@EVERY
def test_continuous_usage_counts_alone_where_the_dialect_says_so(dialect):
    alone = parse(dialect, stream=True, stream_options={"continuous_usage_stats": True})
    both = parse(dialect, stream=True, stream_options={"continuous_usage_stats": True, "include_usage": True})
    assert both.has_continuous_usage
    assert alone.has_continuous_usage == (not dialect.continuous_usage_needs_usage)


def test_a_client_that_chooses_its_usage_gets_none_in_the_finish_chunk():
    dialect = DIALECTS["llama.cpp"]
    assert parse(dialect, stream=True).finish_chunk_has_usage
    assert not parse(dialect, stream=True, stream_options={"include_usage": False}).finish_chunk_has_usage


def test_best_of_counts_what_is_returned_in_mistral_rs():
    dialect = DIALECTS["mistral.rs"]
    request = parse(dialect, n=4, best_of=2)
    assert (request.num_candidates, request.num_returned) == (4, 2)
    assert refusal(dialect, n=2, best_of=3).param == "best_of"
    request = parse(DIALECTS["union"], n=2, best_of=4)
    assert (request.num_candidates, request.num_returned) == (4, 2)


@pytest.mark.parametrize("asked", ["OpenAI", " MISTRAL.RS ", "Llama.cpp"])
def test_a_dialect_may_be_named_in_any_case(asked):
    assert dialect_named(asked).name == asked.strip().lower()


def test_of_several_limits_llama_cpp_takes_its_own_and_tells_which_were_ignored():
    sent = {"max_tokens": 5, "max_completion_tokens": 6, "n_predict": 7}
    request = parse(DIALECTS["llama.cpp"], **sent)
    assert (request.max_tokens, request.max_tokens_name) == (7, "n_predict")
    assert set(request.ignored_parameters) == {"max_tokens", "max_completion_tokens"}
    assert parse(DIALECTS["llama.cpp"], max_tokens=7, n_predict=None).max_tokens == 7
    assert parse(DIALECTS["llama.cpp"], max_tokens=7, n_predict=7.0).ignored_parameters == ()
    assert refusal(DIALECTS["union"], **sent).param == "max_completion_tokens"


@EVERY
def test_a_model_that_was_not_sent_is_the_dialects_or_is_asked_for(dialect):
    if dialect.default_model is not None:
        assert parse(dialect, model=None).model == dialect.default_model
    else:
        assert refusal(dialect, model=None).param == "model"


@pytest.mark.parametrize("error", [InvalidRequest("no", "n", {"n_ctx": 5}), ModelNotFound("no"), Unavailable("no")])
@EVERY
def test_an_error_has_a_body_that_openapi_describes(dialect, error):
    body = json.loads(json.dumps(error_body(error, dialect)))
    jsonschema.validate(body, {**SCHEMAS["Error"], "components": {"schemas": SCHEMAS}})
    assert error.message in json.dumps(body)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@EVERY
def test_tools_mean_the_same_everywhere(dialect):
    assert parse(dialect, tools=[TOOL], tool_choice="none").tool_use.usable == ()
    assert parse(dialect, tools=[TOOL], tool_choice="required").tool_use.names == {"f"}
    assert refusal(dialect, tools=[TOOL, {"type": "f"}], tool_choice="none").param == "tools[1]"
    assert refusal(dialect, tools=[TOOL], tool_choice="required", regex="a+").param == "tool_choice"


def test_the_listing_says_what_a_name_does_beside_the_one_it_stands_for():
    body = dialects_body(default=DIALECTS["union"], of_models={})
    for dialect in body["data"]:
        assert "switches Mirostat 2 on" in dialect["parameters"]["mirostat_target"]["besides"]


def test_an_unknown_dialect_is_refused_with_those_there_are():
    with pytest.raises(InvalidRequest, match=r"mistral\.rs, fireworks") as caught:
        dialect_named("nobody's")
    assert caught.value.param == "X-Completions-Dialect"


def test_the_listing_shows_defaults_meanings_and_a_disposition_for_each_parameter():
    body = json.loads(json.dumps(dialects_body(default=DIALECTS["openai"], of_models={"demo": "llama.cpp"})))
    assert (body["default"], body["models"]) == ("openai", {"demo": "llama.cpp"})
    assert [each["name"] for each in body["data"]] == list(NAMES)
    for shown in body["data"]:
        dialect = DIALECTS[shown["name"]]
        request = parse(dialect).model_dump(mode="json", exclude={"model", "prompts"})
        assert shown["defaults"] == request
        assert set(shown["parameters"]) == set(PARAMETERS)
        allowed = shown["parameters"]["max_tokens"]["allowed"]
        assert allowed.startswith(f"an integer from {dialect.least_max_tokens} to {MAX}")
        assert ("-1 is no limit" in allowed) == dialect.takes_unlimited_tokens
        assert shown["parameters"]["n_predict"] == {"disposition": "renamed", "to": "max_tokens"}
        assert shown["parameters"]["suffix"]["disposition"] == "carried"
        assert shown["meanings"]["error_shape"] == dialect.error_shape.value


@pytest.mark.parametrize("name", sorted(name for name, each in PARAMETERS.items() if not isinstance(each, Inert)))
def test_a_value_of_no_use_is_refused_by_the_name_it_was_sent_under(name):
    of_no_use = {"stream_options": "value", "json_schema": 5, "guided_json": 5}.get(name, {"no": [], "such": "value"})
    for dialect in DIALECTS.values():
        found = refusal(dialect, **{name: of_no_use})
        assert found.param is not None, dialect.name
        assert found.param.startswith(name), dialect.name
