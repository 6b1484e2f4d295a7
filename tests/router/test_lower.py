"""One internal request per prompt, with everything the engine needs."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from serve_app.api.dialects import DIALECTS, UNION
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.parse import CHAT
from serve_app.catalog.resolve import Wanted
from serve_app.core.errors import InvalidRequest
from serve_app.core.names import ModelRef
from serve_app.core.request import LogprobParams, StopParams
from serve_app.router.lower import lower, new_response_id
from tests.fakes import model_card
from tests.parsing import parse_completion, parse_request


def lowered(limits: WireLimits = DEFAULT_LIMITS, **members: object):
    request = parse_completion(json.dumps({"model": "tiny", "prompt": "Hello", **members}).encode(), limits)
    return lower(request, "cmpl-1", resolve=resolve, card_of=lambda ref: model_card(ref.base, vocab_size=100))


def resolve(wanted: Wanted) -> ModelRef:
    return ModelRef(base=wanted.model, adapter=wanted.adapter, version="v1" if wanted.adapter else "")


def test_each_prompt_becomes_a_request_named_after_its_place():
    requests = lowered(prompt=["a", [1, 2]], n=3, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1)
    assert [r.request_id for r in requests] == ["cmpl-1/0", "cmpl-1/1"]
    assert [r.prompt_index for r in requests] == [0, 1]
    assert [r.prompt.parts for r in requests] == [("a",), ((1, 2),)]
    assert {r.n for r in requests} == {3}
    sampling = requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.9, 0.1)


TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("members", "shown"),
    [
        ({"tools": [TOOL]}, ("[THINK]", "[TOOL_CALLS]", "[ARGS]")),
        ({"tools": [TOOL], "separate_reasoning": False}, ("[TOOL_CALLS]", "[ARGS]")),
        ({}, ("[THINK]",)),
        ({"tools": [TOOL], "skip_special_tokens": False}, ()),
    ],
)
def test_of_special_tokens_a_chat_is_shown_the_marks_that_it_is_read_by(members, shown):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], **members}
    request = parse_request(CHAT, json.dumps(body).encode(), DEFAULT_LIMITS, lambda _: UNION)
    card = replace(model_card("tiny"), chat_template="[THINK]{{ thought }}[/THINK][TOOL_CALLS]{{ name }}[ARGS]")
    (lower_request,) = lower(request, "chatcmpl-1", resolve=resolve, card_of=lambda _: card)
    assert {"[THINK]", "[TOOL_CALLS]", "[ARGS]"} & set(lower_request.shown_marks) == set(shown)
    assert lower_request.skips_special_tokens is (members.get("skip_special_tokens") is not False)


def test_what_completions_come_to_is_bounded_by_the_context_first():
    limits = WireLimits(max_total_tokens=512 * 4)  # the context is 512 tokens
    assert len(lowered(limits, prompt=["a"] * 4, max_tokens=20_000_000)) == 4
    for name in ("max_tokens", "n_predict"):
        with pytest.raises(InvalidRequest, match="5 × 512") as caught:
            lowered(limits, prompt=["a"] * 5, **{name: 20_000_000})
        assert caught.value.param == name
    assert len(lowered(limits, prompt=["a"] * 5, max_tokens=400)) == 5


def test_a_stop_token_is_one_of_the_vocabulary():
    assert lowered(stop_token_ids=[99])[0].stop.token_ids == (99,)
    with pytest.raises(InvalidRequest, match=r"from 0 to 99, .*; found 100") as caught:
        lowered(stop_token_ids=[100, 5])
    assert caught.value.param == "stop_token_ids"


def test_an_allowed_token_is_one_of_the_vocabulary():
    assert lowered(allowed_token_ids=[99, 1, 99])[0].sampling.allowed_token_ids == (99, 1)
    with pytest.raises(InvalidRequest, match=r"from 0 to 99, .*; found 100") as caught:
        lowered(allowed_token_ids=[5, 100])
    assert caught.value.param == "allowed_token_ids"


def test_what_vllm_calls_the_prompts_affairs_is_the_engines():
    plain, named = lowered()[0], lowered(add_special_tokens=False, cache_salt="own", truncate_prompt_tokens=7)[0]
    assert (plain.prompt.adds_special, plain.cache_salt, plain.context.max_prompt_tokens) == (True, "", None)
    assert (named.prompt.adds_special, named.cache_salt, named.context.max_prompt_tokens) == (False, "own", 7)
    beside = lowered(truncate_prompt_tokens=-1, truncation_side="right")[0].context
    assert (beside.max_prompt_tokens, beside.keeps_beginning) == (0, True)
    assert lowered(truncate_prompt_tokens=0)[0].context.max_prompt_tokens is None


def test_log_probabilities_of_the_prompt_are_asked_for_beside_those_of_the_completion():
    assert lowered(prompt_logprobs=3)[0].logprobs == LogprobParams(top=None, whole_prompt=3)
    both = lowered(prompt_logprobs=3, logprobs=5, echo=True)[0].logprobs
    assert both == LogprobParams(top=5, prompt=True, whole_prompt=3)
    assert (both.prompt_top, lowered(prompt_logprobs=3, logprobs=5)[0].logprobs.prompt_top) == (5, 3)
    assert lowered(prompt_logprobs=3, n=1, best_of=2)[0].logprobs == LogprobParams(top=0, whole_prompt=3)


@pytest.mark.parametrize("key", ["9" * 40, "-" + "9" * 40, "100", "-1"])
def test_a_biased_id_is_one_of_the_vocabulary_however_long_it_is(key):
    with pytest.raises(InvalidRequest, match=r"token ids from 0 to \d+, or texts; found the id"):
        lowered(logit_bias={key: 1})


@pytest.mark.parametrize(("sent", "used"), [(0, 0.01), (1e-9, 0.01), (0.5, 0.5), (2, 2.0)])
def test_a_repetition_penalty_of_0_is_the_least_that_divides(sent, used):
    assert lowered(repetition_penalty=sent)[0].sampling.repetition_penalty == used


def test_response_ids_are_unique_and_of_the_contracts_form():
    ids = {new_response_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"cmpl-[0-9a-f]{24,}", response_id) for response_id in ids)


def test_all_prompts_share_the_seed_that_was_sent():
    assert {r.sampling.seed for r in lowered(prompt=["a", "b"], seed=42)} == {42}


def test_without_a_seed_one_is_drawn_for_the_whole_request():
    seeds = [{r.sampling.seed for r in lowered(prompt=["a", "b"])} for _ in range(5)]
    assert all(len(of_request) == 1 for of_request in seeds)
    assert len(set.union(*seeds)) == 5


@pytest.mark.parametrize("seed", [0, -2, 2**63 - 1, -(2**63)])
def test_any_seed_fits_63_bits_and_is_kept_from_request_to_request(seed):
    (first,), (second,) = lowered(seed=seed), lowered(seed=seed)
    assert first.sampling.seed == second.sampling.seed
    assert 0 <= first.sampling.seed < 2**63


@pytest.mark.parametrize(("sent", "meant"), [(-1, None), (0, 0), (5, 5)])
def test_minus_one_token_is_no_limit(sent, meant):
    (request,) = lowered(max_tokens=sent, stop=["END"])
    assert request.stop == StopParams(max_tokens=meant, strings=("END",))


@pytest.mark.parametrize(
    ("members", "params"),
    [
        ({}, None),
        ({"logprobs": 0}, LogprobParams(top=0, prompt=False)),
        ({"logprobs": 3, "echo": True}, LogprobParams(top=3, prompt=True)),
        ({"echo": True}, None),
    ],
)
def test_prompt_logprobs_are_wanted_where_the_prompt_is_echoed(members, params):
    (request,) = lowered(**members)
    assert request.logprobs == params
    assert request.echo == members.get("echo", False)


def test_each_prompt_gets_the_adapter_named_for_it():
    requests = lowered(prompt=["a", "b", "c"], lora_path=["sql", None, "sql"])
    assert [r.model.adapter for r in requests] == ["sql", None, "sql"]


@pytest.mark.parametrize(("prompt", "param"), [([99, 100], "prompt"), (["a", [1], ["x", 250]], "prompt[2]")])
def test_a_token_id_outside_the_vocabulary_is_refused(prompt, param):
    with pytest.raises(InvalidRequest, match="which are the model's vocabulary") as caught:
        lowered(prompt=prompt)
    assert caught.value.param == param


RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_tokens": 8}


def lowered_with_defaults(dialect: str, **members: object):
    body = json.dumps({"model": "tiny", "prompt": "Hello", **members}).encode()
    request = parse_completion(body, choose_dialect=lambda model: DIALECTS[dialect])
    card = replace(model_card("tiny"), default_sampling=tuple(RECOMMENDED.items()))
    (found,) = lower(request, "cmpl-1", resolve=resolve, card_of=lambda ref: card)
    return found


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_was_not_sent_is_the_models_in_dialects_that_have_it_so_and_else_the_dialects(dialect: str) -> None:
    found, neutral = lowered_with_defaults(dialect), parse_completion(
        b'{"model": "tiny", "prompt": "x"}', choose_dialect=lambda model: DIALECTS[dialect]
    )  # fmt: skip
    is_models = dialect in ("union", "vllm", "sglang")
    for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
        assert getattr(found.sampling, name) == (RECOMMENDED[name] if is_models else getattr(neutral, name)), name
    assert found.sampling.min_p == neutral.min_p
    assert (found.stop.max_tokens == 8) is is_models


def test_what_was_sent_beats_what_the_model_recommends() -> None:
    found = lowered_with_defaults("union", temperature=0, top_k=0, top_p=1, repetition_penalty=None, max_tokens=99)
    assert (found.sampling.temperature, found.sampling.top_k, found.sampling.top_p) == (0, 0, 1)
    assert (found.sampling.repetition_penalty, found.sampling.is_greedy) == (1.05, True)
    assert found.stop.max_tokens == 99


def test_a_recommended_length_leaves_what_has_to_be_generated() -> None:
    assert lowered_with_defaults("union", min_tokens=10).stop.max_tokens == 10
    assert lowered_with_defaults("union", max_tokens=-1).stop.max_tokens is None
