"""Bytes to CompletionRequest: defaults, aliases, ranges, and a message for everything that is wrong."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import UNION
from serve_app.api.forms.form import Terms
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.parameters import PARAMETERS, Carried, NotYet, Renamed
from serve_app.core.errors import InvalidRequest, ServeError, UnsupportedParameter
from serve_app.core.prompt import Prompt
from tests.parsing import parse_completion


def parse(limits: WireLimits = DEFAULT_LIMITS, **members: object):
    body = {"model": "tiny", "prompt": "Hello", **members}
    return parse_completion(json.dumps(body).encode(), limits)


def refusal(limits: WireLimits = DEFAULT_LIMITS, **members: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(limits, **members)
    return caught.value


def test_a_request_without_options_gets_the_defaults_of_union():
    request = parse()
    assert request.model == "tiny"
    assert request.prompts == (Prompt(parts=("Hello",)),)
    assert request.dialect is UNION
    assert request == CompletionRequest(model="tiny", prompts=request.prompts)


@pytest.mark.parametrize("name", sorted(set(PARAMETERS) - {"model", "prompt"}))
def test_null_equals_absence(name):
    assert parse(**{name: None}) == parse()


@pytest.mark.parametrize(
    ("name", "value", "field", "parsed"),
    [
        ("max_completion_tokens", 7, "max_tokens", 7),
        ("n_predict", 7, "max_tokens", 7),
        ("max_tokens", -1, "max_tokens", -1),
        ("max_tokens", 50.0, "max_tokens", 50),
        ("max_tokens", -1.0, "max_tokens", -1),
        ("max_tokens", 20_000_000, "max_tokens", 20_000_000),
        ("n", 2.0, "n", 2),
        ("top_k", -1.0, "top_k", 0),
        ("seed", -1.0, "seed", None),
        ("logprobs", 1.0, "logprobs", 1),
        ("mirostat", 2.0, "mirostat", 2),
        ("top_p", 0, "top_p", 0.0),
        ("repetition_penalty", 0, "repetition_penalty", 0.0),
        ("repeat_penalty", 2, "repetition_penalty", 2.0),
        ("max_tokens", 0, "max_tokens", 0),
        ("n_cmpl", 3, "n", 3),
        ("n", 128, "n", 128),
        ("n_probs", 2, "logprobs", 2),
        ("n_probs", 0, "logprobs", None),
        ("logprobs", 0, "logprobs", 0),
        ("logprobs", 5, "logprobs", 5),
        ("temperature", 0, "temperature", 0.0),
        ("temperature", 2, "temperature", 2.0),
        ("top_p", 1, "top_p", 1.0),
        ("top_p", 1e-9, "top_p", 1e-9),
        ("top_k", -1, "top_k", 0),
        ("top_k", 0, "top_k", 0),
        ("top_k", 128, "top_k", 128),
        ("min_p", 1, "min_p", 1.0),
        ("seed", -1, "seed", None),
        ("seed", -2, "seed", -2),
        ("seed", 2**63 - 1, "seed", 2**63 - 1),
        ("stop", "END", "stop", ("END",)),
        ("stop", ["a", "", "b", "a"], "stop", ("a", "b")),
        ("stop", "", "stop", ()),
        ("stop", [], "stop", ()),
        ("stop", list("abcdefgh"), "stop", tuple("abcdefgh")),
        ("lora_path", "sql", "lora_path", "sql"),
        ("lora_path", [None], "lora_path", (None,)),
        ("user", "u-1", "user", "u-1"),
        ("echo", True, "echo", True),
        ("best_of", 3, "best_of", 3),
        ("typical_p", 0.5, "typical_p", 0.5),
        ("typ_p", 0.5, "typical_p", 0.5),
        ("top_n_sigma", -1, "top_n_sigma", -1.0),
        ("top_n_sigma", 1.5, "top_n_sigma", 1.5),
        ("min_keep", 3, "min_keep", 3),
        (
            "samplers",
            ["dry", "top_k", "typical_p", "temperature"],
            "samplers",
            ("dry", "top_k", "typ_p", "temperature"),
        ),
        ("samplers", [], "samplers", ()),
        ("dynatemp_range", 0.5, "dynatemp_range", 0.5),
        ("dynatemp_exponent", 2, "dynatemp_exponent", 2.0),
        ("presence_penalty", -2, "presence_penalty", -2.0),
        ("frequency_penalty", 2, "frequency_penalty", 2.0),
        ("repetition_penalty", 1.2, "repetition_penalty", 1.2),
        ("repeat_penalty", 1.2, "repetition_penalty", 1.2),
        ("repeat_last_n", -1, "repeat_last_n", -1),
        ("repeat_last_n", 0, "repeat_last_n", 0),
        ("mirostat", 2, "mirostat", 2),
        ("mirostat_tau", 4, "mirostat_tau", 4.0),
        ("mirostat_target", 4, "mirostat_tau", 4.0),
        ("mirostat_target", 4, "mirostat", 2),
        ("mirostat_target", 0, "mirostat", None),
        ("mirostat_eta", 0.2, "mirostat_eta", 0.2),
        ("mirostat_lr", 0.2, "mirostat_eta", 0.2),
        ("mirostat_lr", 0.2, "mirostat", None),
        ("dry_multiplier", 0.8, "dry_multiplier", 0.8),
        ("dry_base", 2, "dry_base", 2.0),
        ("dry_allowed_length", 3, "dry_allowed_length", 3),
        ("dry_sequence_breakers", ["\n", "x"], "dry_sequence_breakers", ("\n", "x")),
        ("dry_penalty_last_n", 64, "dry_penalty_last_n", 64),
        ("xtc_probability", 0.5, "xtc_probability", 0.5),
        ("xtc_threshold", 0.2, "xtc_threshold", 0.2),
        ("logit_bias", {"5": -100, "x": 1.5, "7": False}, "logit_bias", ((5, -100.0), ("x", 1.5), (7, -math.inf))),
        ("logit_bias", [[5, 300], ["x", -1000], ["6", 1]], "logit_bias", ((5, 100.0), ("x", -100.0), (6, 1.0))),
        ("logit_bias", {"-3": 1, "9" * 18: 1}, "logit_bias", ((-1, 1.0), (2**31 - 1, 1.0))),
        ("logit_bias", {"9" * 40: 1, "-" + "9" * 40: 2}, "logit_bias", ((2**31 - 1, 1.0), (-1, 2.0))),
        ("logit_bias", {"0" * 40 + "5": 1}, "logit_bias", ((5, 1.0),)),
        ("logit_bias", {}, "logit_bias", ()),
        ("stop_token_ids", [5, None, 7, 5], "stop_token_ids", (5, 7)),
        ("stop_token_ids", [5.0, 7], "stop_token_ids", (5, 7)),
        ("logit_bias", [[5.0, 1]], "logit_bias", ((5, 1.0),)),
        ("lora", [{"id": 1.0, "scale": 1.0}], "lora", ((1, 1.0),)),
        ("stop_regex", "a+", "stop_regex", ("a+",)),
        ("stop_regex", ["a+", "", "b"], "stop_regex", ("a+", "b")),
        ("no_stop_trim", True, "no_stop_trim", True),
        ("include_stop_str_in_output", True, "no_stop_trim", True),
        ("ignore_eos", True, "ignore_eos", True),
        ("min_tokens", 3, "min_tokens", 3),
        ("truncate_sequence", True, "truncate_sequence", True),
        ("context_length_exceeded_behavior", "error", "context_length_exceeded_behavior", "error"),
        ("echo_last", 3, "echo_last", 3),
        ("logprobs", True, "logprobs", 1),
        ("logprobs", False, "logprobs", None),
        ("skip_special_tokens", False, "skip_special_tokens", False),
        ("return_token_ids", True, "return_token_ids", True),
        ("return_tokens", True, "return_token_ids", True),
        ("return_cached_tokens_details", True, "return_cached_tokens_details", True),
        ("timings_per_token", True, "timings_per_token", True),
        ("cache_prompt", False, "cache_prompt", False),
        ("lora", [{"id": 1, "scale": 1.0}, {"id": 0, "scale": 0}], "lora", ((1, 1.0), (0, 0.0))),
        ("lora", {}, "lora", ()),
        ("stream", True, "stream", True),
    ],
)
def test_a_parameter_is_read_under_each_of_its_names(name, value, field, parsed):
    assert getattr(parse(**{name: value}), field) == parsed


INVALID = [
    ("model", 5, "non-empty string"),
    ("model", "", "non-empty string"),
    ("model", "m" * 513, "at most 512"),
    ("model", [], "a list of 1 to 16 of them"),
    ("n", 0, "from 1 to 128"),
    ("n", 129, "from 1 to 128"),
    ("n", -1, "from 1 to 128"),
    ("n", True, "found true"),
    ("n", 1.5, "found 1.5"),
    ("n", "2", 'found "2"'),
    ("n_cmpl", 0, "from 1 to 128"),
    ("max_tokens", -2, "from -1 to 2147483647; -1 is no limit"),
    ("max_tokens", True, "found true"),
    ("max_tokens", 1.5, "found 1.5"),
    ("max_tokens", "16", 'found "16"'),
    ("max_tokens", 2**31, "from -1 to 2147483647"),
    ("n_predict", -5, "found -5"),
    ("max_completion_tokens", [], "found []"),
    ("temperature", -0.1, "from 0 to 2"),
    ("temperature", 2.1, "from 0 to 2"),
    ("temperature", True, "found true"),
    ("temperature", "1", 'found "1"'),
    ("temperature", 10**400, "digits"),
    ("top_p", -0.1, "from 0 to 1"),
    ("top_p", 1.01, "from 0 to 1"),
    ("top_p", False, "found false"),
    ("top_k", -2, "from -1 to 2147483647; 0 and -1 keep every token"),
    ("top_k", 1.5, "found 1.5"),
    ("top_k", True, "found true"),
    ("top_k", 10**1000, "digits"),
    ("min_p", -0.1, "from 0 to 1"),
    ("min_p", 1.1, "from 0 to 1"),
    ("seed", 2**63, f"from {-(2**63)} to {2**63 - 1}; -1 is a random one"),
    ("seed", -(2**63) - 1, f"from {-(2**63)} to {2**63 - 1}"),
    ("seed", 1.5, "found 1.5"),
    ("seed", True, "found true"),
    ("seed", "7", 'found "7"'),
    ("logprobs", -1, "from 0 to 5"),
    ("logprobs", 6, "from 0 to 5"),
    ("n_probs", True, "found true"),
    ("presence_penalty", 2.1, "from -2 to 2"),
    ("presence_penalty", True, "found true"),
    ("frequency_penalty", -2.1, "from -2 to 2"),
    ("repetition_penalty", -0.1, "from 0 to 100; what is below 0.01 counts as 0.01"),
    ("repetition_penalty", "1", 'found "1"'),
    ("repeat_penalty", 101, "from 0 to 100"),
    ("repeat_last_n", -2, "from -1 to 2147483647; -1 is the whole context"),
    ("typical_p", 0, "above 0"),
    ("typical_p", 1.1, "at most 1"),
    ("top_n_sigma", "3", 'found "3"'),
    ("min_keep", -1, "from 0 to 2147483647"),
    ("dynatemp_range", -1, "from 0 to 100"),
    ("dynatemp_exponent", False, "found false"),
    ("mirostat", 3, "from 0 to 2"),
    ("mirostat", True, "found true"),
    ("mirostat_tau", 0, "above 0"),
    ("mirostat_target", -1, "above 0"),
    ("mirostat_eta", 0, "above 0"),
    ("mirostat_lr", "0.1", 'found "0.1"'),
    ("dry_multiplier", -0.1, "from 0 to 100"),
    ("dry_base", 101, "from 0 to 100"),
    ("dry_allowed_length", -1, "from 0 to 2147483647"),
    ("dry_allowed_length", 2.5, "found 2.5"),
    ("dry_sequence_breakers", [], "1 to 64 non-empty strings"),
    ("dry_sequence_breakers", [""], "non-empty"),
    ("dry_sequence_breakers", "x", "a list"),
    ("dry_penalty_last_n", -2, "from -1 to 2147483647; -1 is the whole context"),
    ("xtc_probability", 1.5, "from 0 to 1"),
    ("xtc_threshold", -0.1, "from 0 to 1"),
    ("samplers", "top_k", "a list of these names"),
    ("logit_bias", 5, "an object or a list of pairs"),
    ("stop_token_ids", 5, "a list of at most 1024 token ids"),
    ("stop_token_ids", [1] * 1025, "found 1025 elements"),
    ("stop_regex", {}, "a regular expression"),
    ("stop_regex", "x" * 1025, "at most 1024"),
    ("no_stop_trim", 1, "a boolean"),
    ("include_stop_str_in_output", "yes", "a boolean"),
    ("ignore_eos", 0, "a boolean"),
    ("min_tokens", -1, "from 0 to 2147483647"),
    ("min_tokens", True, "found true"),
    ("truncate_sequence", 1, "a boolean"),
    ("context_length_exceeded_behavior", "shrink", '"truncate" or "error"'),
    ("best_of", 0, "from 1 to 128"),
    ("best_of", 129, "from 1 to 128"),
    ("echo_last", -1, "from 0 to 2147483647"),
    ("post_sampling_probs", 1, "a boolean"),
    ("skip_special_tokens", "no", "a boolean"),
    ("return_token_ids", 1, "a boolean"),
    ("return_cached_tokens_details", 1, "a boolean"),
    ("timings_per_token", 1, "a boolean"),
    ("cache_prompt", 1, "a boolean"),
    ("lora", {"id": 0, "scale": 1}, "a list of at most 128 objects"),
    ("logprobs", 1.5, "an integer"),
    ("n_probs", 1025, "from 0 to 1024"),
    ("echo", 1, "a boolean"),
    ("echo", "true", "a boolean"),
    ("stream", 1, "a boolean"),
    ("stream", "yes", "a boolean"),
    ("stream_options", True, "include_usage"),
    ("stream_options", [], "include_usage"),
    ("stop", 5, "found 5"),
    ("stop", {"a": 1}, 'found {"a": 1}'),
    ("stop", ["x"] * 65, "at most 64"),
    ("stop", "x" * 1025, "at most 1024"),
    ("lora_path", 5, "found 5"),
    ("lora_path", "", "the name of an adapter"),
    ("lora_path", [], "1 in all; found 0"),
    ("lora_path", ["a", "b"], "1 in all; found 2"),
    ("user", 5, "a string"),
    ("user", ["a"], "a string"),
]


@pytest.mark.parametrize(("name", "value", "words"), INVALID)
def test_a_value_that_is_not_allowed_is_named_as_the_client_spelled_it(name, value, words):
    error = refusal(**{name: value})
    assert (error.status, error.code) == (400, "invalid_value")
    assert error.param == name
    assert error.message.startswith(f'"{name}" must ')
    assert words in error.message


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a", None]}, "stop[1]"),
        ({"stop": ["a", "x" * 1025]}, "stop[1]"),
        ({"lora_path": [5]}, "lora_path[0]"),
        ({"stop_regex": [5]}, "stop_regex[0]"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"logit_bias": {"x": True}}, 'logit_bias["x"]'),
        ({"logit_bias": {"5": None}}, 'logit_bias["5"]'),
        ({"logit_bias": [[5, 1], [5]]}, "logit_bias[1]"),
        ({"logit_bias": [[5, "1"]]}, "logit_bias[0]"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias[0]"),
        ({"samplers": ["top_k", "topk"]}, "samplers[1]"),
        ({"samplers": ["top_k", "top_k"]}, "samplers[1]"),
        ({"samplers": ["top_k", "penalties"]}, "samplers[1]"),
        ({"dry_sequence_breakers": ["x", 5]}, "dry_sequence_breakers[1]"),
        ({"lora": [5]}, "lora[0]"),
        ({"lora": [{"id": 0}]}, "lora[0]"),
        ({"lora": [{"id": True, "scale": 1}]}, "lora[0]"),
        ({"lora_path": [""]}, "lora_path[0]"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"continuous_usage_stats": "no"}}, "stream_options.continuous_usage_stats"),
    ],
)
def test_the_wrong_part_of_a_list_or_object_is_named(members, param):
    error = refusal(**members)
    assert error.param == param
    assert error.message.startswith(f'"{param}" must ')


@pytest.mark.parametrize("name", ["model", "prompt"])
@pytest.mark.parametrize("body", [{}, {"model": None, "prompt": None}])
def test_what_is_required_is_named_when_it_is_missing(name, body):
    others = {"model": "tiny", "prompt": "Hello"} | {name: body.get(name)}
    with pytest.raises(InvalidRequest, match=f'^"{name}" must be .*; found nothing') as caught:
        parse_completion(json.dumps({k: v for k, v in others.items() if k in body or v}).encode())
    assert caught.value.param == name


def test_two_names_of_one_parameter_may_agree():
    assert parse(max_tokens=5, n_predict=5, max_completion_tokens=None).max_tokens == 5


@pytest.mark.parametrize(
    "members",
    [{"max_tokens": 5, "n_predict": 6}, {"max_completion_tokens": 5, "max_tokens": 6}, {"n": 1, "n_cmpl": True}],
)
def test_two_names_of_one_parameter_that_differ_are_both_named(members):
    error = refusal(**members)
    assert all(f'"{name}"' in error.message for name in members)
    assert error.param == list(members)[1]


NOT_YET = {name: disposition for name, disposition in PARAMETERS.items() if isinstance(disposition, NotYet)}


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_a_parameter_not_carried_out_is_refused_by_name(name):
    error = refusal(**{name: ["something", 17, "else"]})
    assert isinstance(error, UnsupportedParameter)
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert error.message.startswith(f'"{name}" must be ')


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, d in sorted(NOT_YET.items()) for v in d.neutral])
def test_a_neutral_value_changes_nothing(name, value):
    assert parse(**{name: value}) == parse()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("raw_output", 0),  # a number is not false
        ("skew", True),
        ("logprob_token_ids", []),
        ("tfs", 0.9),
    ],
)
def test_what_only_looks_neutral_is_refused(name, value):
    assert refusal(**{name: value}).param == name


@pytest.mark.parametrize(
    ("members", "param", "named"),
    [
        ({"best_of": 1, "n": 2}, "best_of", ["best_of", "n"]),
        ({"best_of": 2, "stream": True}, "best_of", ["best_of", "stream"]),
        ({"n_cmpl": 3, "best_of": 2}, "best_of", ["best_of", "n_cmpl"]),
        ({"min_tokens": 17}, "min_tokens", ["min_tokens", "max_tokens"]),
        ({"min_tokens": 3, "n_predict": 2}, "min_tokens", ["min_tokens", "n_predict"]),
        ({"top_logprobs": 2}, "top_logprobs", ["top_logprobs", "logprobs"]),
        ({"top_logprobs": 2, "logprobs": 3}, "top_logprobs", ["top_logprobs", "logprobs"]),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs", ["top_logprobs", "logprobs"]),
        ({"top_logprobs": 6, "logprobs": True}, "top_logprobs", ["top_logprobs"]),
        ({"top_logprobs": True, "logprobs": True}, "top_logprobs", ["top_logprobs"]),
        ({"echo": True, "echo_last": 2}, "echo_last", ["echo", "echo_last"]),
        ({"post_sampling_probs": True}, "post_sampling_probs", ["post_sampling_probs", "logprobs"]),
        ({"mirostat": 0, "mirostat_target": 3}, "mirostat_target", ["mirostat", "mirostat_target"]),
        ({"mirostat_tau": 5, "mirostat_target": 3}, "mirostat_target", ["mirostat_tau", "mirostat_target"]),
        ({"mirostat_eta": 0.1, "mirostat_lr": 0.2}, "mirostat_lr", ["mirostat_eta", "mirostat_lr"]),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repetition_penalty", ["repeat_penalty"]),
        ({"lora": [{"id": 0, "scale": 1}], "lora_path": "a"}, "lora", ["lora", "lora_path"]),
    ],
)
def test_parameters_that_contradict_each_other_are_all_named(members, param, named):
    error = refusal(**members)
    assert error.param == param
    assert all(f'"{name}"' in error.message for name in named)


def test_a_best_of_one_is_no_ranking_even_in_a_stream():
    request = parse(best_of=1, n=1, stream=True)
    assert not request.is_ranked
    assert request.num_choices == 1


def test_candidates_count_against_the_bounds():
    error = refusal(WireLimits(max_choices=10), prompt=["a"] * 4, best_of=3)
    assert (error.param, "4 × 3 = 12" in error.message) == ("best_of", True)


@pytest.mark.parametrize(("top", "count"), [(0, 0), (3, 3)])
def test_top_logprobs_is_the_count_where_logprobs_is_true(top, count):
    assert parse(logprobs=True, top_logprobs=top).logprobs == count
    assert parse(logprobs=top, top_logprobs=top).logprobs == count
    assert parse(logprobs=False, top_logprobs=0) == parse(top_logprobs=0) == parse()


def test_either_order_of_two_agreeing_names_switches_mirostat_on():
    assert parse(mirostat_target=3, mirostat_tau=3).mirostat == 2
    assert parse(mirostat_tau=3, mirostat_target=3).mirostat == 2
    assert parse(mirostat_target=3, mirostat=1).mirostat == 1


def test_stream_options_are_read_and_without_stream_ignored():
    request = parse(stream_options={"include_usage": True, "continuous_usage_stats": None})
    assert request.stream_options.include_usage
    assert not request.stream_options.continuous_usage_stats
    assert not request.stream


def test_a_lora_path_per_prompt_is_given_to_its_prompt():
    request = parse(prompt=["a", "b"], lora_path=["sql", None])
    assert [request.lora_path_of(i) for i in range(2)] == ["sql", None]
    assert parse(prompt=["a", "b"], lora_path="sql").lora_path_of(1) == "sql"


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"prompt": ["a"] * 5, "n": 3}, "n"),
        ({"prompt": ["a"] * 5, "n_cmpl": 3}, "n_cmpl"),
        ({"prompt": ["a"] * 9}, "prompt"),
    ],
)
def test_the_amount_of_work_is_bounded_before_it_exists(members, param):
    limits = WireLimits(max_prompts=8, max_choices=10)
    assert refusal(limits, **members).param == param
    assert parse(limits, prompt=["a"] * 5, n=2, max_tokens=10).num_choices == 10


def test_the_configured_bound_of_logprobs_is_held_and_told():
    limits = WireLimits(max_logprobs=20)
    assert parse(limits, logprobs=20).logprobs == 20
    assert "from 0 to 20" in refusal(limits, logprobs=21).message


def test_every_parameter_has_a_disposition_whose_target_exists():
    for name, disposition in PARAMETERS.items():
        match disposition:
            case Renamed():
                assert not isinstance(PARAMETERS[disposition.to], Renamed), name
            case Carried():
                terms = Terms(limits=WireLimits(), dialect=UNION)
                assert disposition.parameter.form.words(terms), name
                assert disposition.parameter.about.endswith("."), name


MEMBERS = st.dictionaries(
    st.sampled_from(sorted(PARAMETERS)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(MEMBERS)
def test_whatever_the_values_are_a_request_is_read_or_refused_with_400(members):
    body = json.dumps({"model": "tiny", "prompt": "Hello", **members}).encode("utf-8", "surrogatepass")
    error = None
    try:
        parse_completion(body)
    except ServeError as refused:
        error = refused
    assert error is None or (error.status == 400 and len(error.message) < 600)
