"""The description and the parser draw the same line: what fits the one is taken by the other, and nothing else is."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jsonschema
import pytest

from serve_app.api.dialects import DIALECTS, LLAMA_CPP, UNION, Dialect
from serve_app.api.embeddings import EmbeddingRequest
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.listings import dialects_body
from serve_app.api.native import read_infill
from serve_app.api.openapi import openapi_document
from serve_app.api.parse import CHAT, NATIVE, read_json_object, read_request
from serve_app.api.scoring import ClassifyRequest, RerankRequest, ScoreRequest
from serve_app.api.tokenize import parse_apply_template, parse_tokenize
from serve_app.core.errors import InvalidRequest
from serve_app.http.styles import checked_native
from tests.fakes import VOCAB_SIZE
from tests.flow.maker import Maker
from tests.flow.prose import Served, obey
from tests.parsing import parse_completion, parse_request

pytestmark = pytest.mark.slow

NUM_CASES = int(os.environ.get("OPENAPI_CASES", "100"))
ONE_FORM = re.compile(r'^"(?P<param>.*?)" must .+; found .+\.( .+[.?])?$', re.DOTALL)


def of_inputs(kind: type[EmbeddingRequest], sent: bytes, limits: WireLimits) -> object:
    return kind.read(read_json_object(sent, max_depth=64), limits, UNION, model=lambda: "tiny")


BESIDES: dict[str, Callable[[bytes, WireLimits], object]] = {
    "EmbeddingsRequest": partial(of_inputs, EmbeddingRequest),
    "RerankRequest": partial(of_inputs, RerankRequest),
    "ScoreRequest": partial(of_inputs, ScoreRequest),
    "ClassifyRequest": partial(of_inputs, ClassifyRequest),
    "TokenizeRequest": parse_tokenize,
    "ApplyTemplateRequest": parse_apply_template,
}
"""Bodies that are no completion's."""


@cache
def document(dialect: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(openapi_document(DEFAULT_LIMITS, DIALECTS[dialect])))
    return made


@cache
def served(dialect: str, schema: str) -> Served:
    listing = dialects_body(default=UNION, of_models={})["data"]
    assert isinstance(listing, list)
    (body,) = [each for each in listing if each["name"] == dialect]
    if schema == "ChatRequest":
        own = {name: {**body[name], **body["chat"][name]} for name in ("parameters", "defaults")}
        body = {**body, **own}
    return Served(dialect=body, models=("tiny", "tiny:sql"), vocab_size=VOCAB_SIZE)


def validator(dialect: str, schema: str) -> jsonschema.Draft202012Validator:
    described = document(dialect)
    return jsonschema.Draft202012Validator(
        {**described["components"]["schemas"][schema], "components": described["components"]}
    )


def refusal(body: dict[str, Any], dialect: Dialect, *, schema: str = "CompletionRequest") -> InvalidRequest | None:
    """What the parser says to a body; None where it takes it."""
    sent = json.dumps(body).encode()
    try:
        if schema == "ChatRequest":
            parse_request(CHAT, sent, DEFAULT_LIMITS, lambda model: dialect)
        elif schema in BESIDES:
            BESIDES[schema](sent, DEFAULT_LIMITS)
        elif schema == "InfillRequest":
            members = read_json_object(sent, max_depth=64)
            read_infill(members, DEFAULT_LIMITS, dialect, model=lambda: "tiny")
        elif schema == "NativeRequest":
            members = {"model": "tiny", **read_json_object(sent, max_depth=64)}
            members["model"] = members["model"] if members["model"] is not None else "tiny"
            checked_native(read_request(NATIVE, members, DEFAULT_LIMITS, dialect=dialect))
        else:
            parse_completion(sent, choose_dialect=lambda model: dialect)
    except InvalidRequest as error:
        return error
    return None


SCHEMAS = [
    *((name, schema) for schema in ("CompletionRequest", "ChatRequest") for name in DIALECTS),
    ("llama.cpp", "NativeRequest"),
    ("llama.cpp", "InfillRequest"),
    *(("union", schema) for schema in BESIDES),
]


@pytest.mark.parametrize(("dialect", "schema"), SCHEMAS)
def test_whatever_fits_the_description_and_its_prose_is_taken(dialect: str, schema: str) -> None:
    maker = Maker(
        document(dialect), random.Random(f"{dialect} {schema}"), oddity=0, given=4 if schema in BESIDES else 12
    )
    fits = validator(dialect, schema)
    num_taken = 0
    for _ in range(NUM_CASES):
        body = maker.value(fits.schema)
        assert isinstance(body, dict)
        if not fits.is_valid(body):
            continue
        body = obey(body, served(dialect, schema), is_completion=schema not in BESIDES)
        error = refusal(body, DIALECTS[dialect], schema=schema)
        assert error is None, f"{error} for {json.dumps(body)[:2000]}"
        num_taken += 1
    assert num_taken > NUM_CASES // 20


@pytest.mark.parametrize(("dialect", "schema"), SCHEMAS)
def test_whatever_does_not_fit_the_description_is_refused_in_the_one_form(dialect: str, schema: str) -> None:
    maker = Maker(document(dialect), random.Random(f"odd {dialect} {schema}"), oddity=0.04, given=4)
    fits = validator(dialect, schema)
    num_refused = 0
    for _ in range(NUM_CASES):
        body = maker.value(fits.schema)
        if not isinstance(body, dict):
            continue
        error = refusal(body, DIALECTS[dialect], schema=schema)
        if error is None:
            assert fits.is_valid(body), f"taken: {json.dumps(body)[:2000]}"
            continue
        num_refused += 1
        if error.param is not None:
            found = ONE_FORM.match(error.message)
            assert found is not None, error.message
            assert found["param"] == error.param, error.message
    assert num_refused > NUM_CASES // 20


@pytest.mark.parametrize(
    "members",
    [
        {"echo": True, "echo_last": 2},
        {"echo": True, "echo_last": 0},
        {"top_logprobs": 2},
        {"top_logprobs": 2, "logprobs": False},
        {"top_logprobs": 2, "logprobs": True},
        {"top_logprobs": 2, "n_probs": 2},
        {"top_logprobs": 0, "n_probs": 0},
        {"post_sampling_probs": True},
        {"post_sampling_probs": True, "n_probs": 0},
        {"post_sampling_probs": True, "n_probs": 1},
        {"lora": [{"id": 0, "scale": 1}], "lora_path": "a"},
        {"lora": [{"id": 0, "scale": 0}], "lora_path": "a"},
        {"lora": [{"id": 0, "scale": -0.5}], "adapter": "a"},
        {"lora": [{"id": 0, "scale": 0}], "adapter": "a"},
        {"lora_path": "a", "adapter": "a"},
        {"lora_path": "a", "adapter": None},
        {"lora": [{"id": 0, "scale": 101}]},
        {"adapter": ""},
        {"model": ["demo", "demo"]},
        {"model": []},
        {"model": ["demo", ""]},
        {"lora": {}},
        {"mirostat_target": 3, "mirostat": 0},
        {"mirostat_target": 0, "mirostat": 0},
        {"mirostat_target": 3, "mirostat": 1},
        {"stream": True, "best_of": 2, "n": 2},
        {"stream": True, "best_of": 1, "n": 1},
        {"stream": True, "best_of": 2, "n_cmpl": 2},
        {"return_tokens": True, "return_token_ids": False},
        {"return_tokens": False, "return_token_ids": True},
        {"return_tokens": True, "return_token_ids": True},
        {"include_stop_str_in_output": True, "no_stop_trim": False},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True}, "stream": True},
        {"stream_options": {"include_obfuscation": True}, "stream": True},
        {"stream_options": {"include_obfuscation": False}, "stream": True},
        {"stream_options": {"odd": 1}, "stream": True},
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tools": [{"type": "function", "function": {}}], "tool_choice": "none"},
        {"tools": False, "tool_choice": "none"},
        {"tools": [{"type": "function", "function": {"name": "two words"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        {"tool_choice": "auto"},
        {"tool_choice": "required"},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}], "regex": "a"},
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}], "regex": ""},
        {"tool_choice": "auto", "tools": [{"type": "function", "function": {"name": "f"}}], "regex": "a"},
        {"tool_choice": "auto", "tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": 1},
        {"prompt": [["a"], "b"]},
        {"prompt": ["a", 15.0]},
        {"prompt": [15.0, 3.0]},
        {"prompt": [15.5]},
        {"prompt": {"prompt_string": "a", "multimodal_data": []}},
        {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}},
        {"grammar": "root ::= [a-z]*", "regex": "x"},
        {"grammar": "root ::= [a-z]*", "regex": ""},
        {"grammar": "", "regex": "x", "response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}, "json_schema": {}},
        {"response_format": {"type": "json_object"}, "json_schema": {}, "ebnf": "root ::= [a-z]*"},
        {"regex": "x", "ebnf": "root ::= [a-z]*", "json_schema": {}},
        {"regex": "x", "ebnf": "root ::= [a-z]*", "grammar": "root ::= [a-z]*"},
        {"regex": "x", "json_schema": {}, "grammar": ""},
        {"response_format": {"type": "json_object", "schema": None}},
        {"response_format": {"type": "json_object", "schema": True}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": True}},
        {"response_format": {"type": "json_schema", "json_schema": "{}"}},
        {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": 5}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}, "schema": {}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": None}, "schema": {}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": True}, "schema": {}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}, "schema": 5}},
        {"response_format": {"type": "json_schema", "json_schema": None, "schema": "{}"}},
        {"response_format": {"type": "grammar", "grammar": ""}},
        {"response_format": {"type": "grammar", "grammar": "root ::= [a-z]*"}},
        {"response_format": {"type": "structural_tag"}},
        {"response_format": {}},
        {"grammar": {"type": "regex", "value": ""}},
        {"grammar": {"type": "regex", "value": {}}},
        {"grammar": {"type": "json_schema", "value": {}}},
        {"grammar": {"type": "json_schema", "value": None}},
        {"grammar": {"type": "lark"}},
        {"grammar": {"type": "llguidance", "value": {}}},
        {"json_schema": True},
        {"json_schema": "x" * 300_000},
        {"model": None},
        {"zzz": 1},
        {"zzz": None},
        {"max_token": None},
        {"stream_options": {"odd": None}, "stream": True},
    ],
    ids=lambda members: json.dumps(members)[:99],
)
def test_parameters_that_exclude_each_other_are_described_so(members: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": "Hello", **members}
    for dialect in DIALECTS:
        error = refusal(body, DIALECTS[dialect], schema="CompletionRequest")
        assert validator(dialect, "CompletionRequest").is_valid(body) is (error is None), f"{dialect}: {error}"


@pytest.mark.parametrize(
    "members",
    [
        {"messages": [{"role": "user", "content": "a", "odd": 1}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "bot", "content": "a"}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": [{"role": "assistant", "content": None}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": []}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "odd", "function": {"name": "f"}}]}]},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]},
        {"messages": [{"role": "user", "content": "a", "tool_calls": 5}]},
        {"messages": [{"role": "tool", "content": "a", "tool_call_id": 5}]},
        {"messages": []},
        {"prompt": "a"},
        {"prompt": None},
        {"echo": True},
        {"echo": False},
        {"best_of": 1},
        {"n_probs": 0},
        {"n_probs": 2},
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": 2},
        {"top_logprobs": 2},
        {"top_logprobs": 2, "n_probs": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": []},
        {"continue_final_message": True, "add_generation_prompt": True},
        {"max_tokens": None},
        {"regex": "a", "response_format": {"type": "text"}},
        {"regex": "a", "response_format": {"type": "json_object"}},
    ],
    ids=lambda members: json.dumps(members)[:99],
)
def test_bodies_of_chats_are_described_as_they_are_read(members: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], **members}
    for dialect in DIALECTS:
        error = refusal(body, DIALECTS[dialect], schema="ChatRequest")
        assert validator(dialect, "ChatRequest").is_valid(body) is (error is None), f"{dialect}: {error}"


def test_the_native_routes_rank_nothing() -> None:
    fits = validator("llama.cpp", "NativeRequest")
    for body, is_taken in (({"prompt": "a"}, True), ({"prompt": "a", "best_of": 1}, False)):
        assert fits.is_valid(body) is is_taken
        assert (refusal(body, LLAMA_CPP, schema="NativeRequest") is None) is is_taken
