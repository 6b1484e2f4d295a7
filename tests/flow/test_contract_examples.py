"""The examples that the systems document work as written, but for the model's name."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from serve_app.api.dialects import DIALECTS
from serve_app.api.parameters import PARAMETERS
from serve_app.tools.literals import LiteralReader
from tests.flow.documented import DOCUMENTED
from tests.flow.stack import Stack, running_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1) as running:
        yield running


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PRODUCT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "price": {"type": "number", "minimum": 0},
        "in_stock": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 5},
    },
    "required": ["name", "price"],
}
TOOL = {  # every member that mistral.rs documents
    "type": "function",
    "function": {"name": "add_product", "description": "Adds a product.", "parameters": PRODUCT, "strict": True},
}
EXAMPLES: dict[str, dict[str, Any]] = {
    "llama.cpp": {"prompt": "Once upon a time", "max_tokens": 50, "temperature": 0.7},
    "llama.cpp logprobs": {"prompt": "The sky is", "max_tokens": 5, "logprobs": 3},
    "llama.cpp batch": {
        "prompt": ["The capital of France is", "The capital of Germany is", "The capital of Italy is"],
        "max_tokens": 5,
    },
    "llama.cpp infill": {"prompt": "def fibonacci(n):\n    ", "suffix": "\n    return result", "max_tokens": 100},
    "llama.cpp mirostat": {
        "prompt": "Write a creative story:", "max_tokens": 200, "mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
    },
    "llama.cpp grammar": {
        "prompt": "Generate a simple arithmetic expression:", "max_tokens": 20,
        "grammar": "root ::= expr\nexpr ::= term (('+' | '-') term)*\nterm ::= factor (('*' | '/') factor)*\n"
                   "factor ::= [0-9]+ | '(' expr ')'",
    },
    "llama.cpp schema": {"prompt": "Generate a product:", "max_tokens": 100, "json_schema": PRODUCT},
    "fireworks JSON mode": {"prompt": "JSON:", "max_tokens": 16, "response_format": {"type": "json_object"}},
    "fireworks schema": {
        "prompt": "JSON:", "max_tokens": 16, "response_format": {"type": "json_object", "schema": PRODUCT},
    },
    "sglang text": {"prompt": "JSON:", "max_tokens": 16, "response_format": {"type": "text"}},
    "sglang schema": {
        "prompt": "JSON:", "max_tokens": 16,
        "response_format": {"type": "json_schema", "json_schema": {"name": "product", "schema": PRODUCT}},
    },
    "sglang schema in a string": {"prompt": "JSON:", "max_tokens": 16, "json_schema": json.dumps(PRODUCT)},
    "sglang regex": {"prompt": "The capital of France is", "regex": "(Paris|London)"},
    "sglang ebnf": {"prompt": "Answer:", "ebnf": 'root ::= "Yes" | "No"'},
    "mistral.rs": {
        "best_of": 1, "dry_allowed_length": None, "dry_base": None, "dry_multiplier": None,
        "dry_sequence_breakers": None, "echo": False, "frequency_penalty": None,
        "grammar": {"type": "regex", "value": "example"}, "logit_bias": None, "logprobs": None,
        "max_tokens": 16, "min_p": None, "n": 1, "presence_penalty": None, "prompt": "Say this is a test.",
        "repetition_penalty": None, "stop": "example", "stream": True, "suffix": None, "temperature": 0.7,
        "tool_choice": "none", "tools": None, "top_k": None, "top_p": None, "truncate_sequence": None,
        "user": "example",
    },
    "mistral.rs tools": {"prompt": "Say this is a test.", "tools": [TOOL], "tool_choice": "auto", "max_tokens": 16},
    "mistral.rs a tool": {
        "prompt": "Say this is a test.", "tools": [TOOL], "max_tokens": 16,
        "tool_choice": {"type": "function", "function": {"name": "add_product"}},
    },
    "omlx": {"prompt": "The quick brown fox", "max_tokens": 50, "temperature": 0.7},
}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("example", EXAMPLES)
async def test_a_documented_example_is_answered_in_every_dialect(stack: Stack, example: str, dialect: str) -> None:
    response = await stack.post({"model": "demo", **EXAMPLES[example]}, dialect=dialect)
    assert response.status_code == 200, response.text


def is_expression(text: str) -> bool:
    return re.fullmatch(r"[0-9()+*/-]*", text) is not None


def is_product(text: str) -> bool:
    return jsonschema.Draft202012Validator(PRODUCT).is_valid(json.loads(text))


def is_call(text: str) -> bool:
    call = json.loads(text)
    return call["name"] == "add_product" and is_product(json.dumps(call["arguments"]))


HELD: dict[str, Callable[[str], bool]] = {
    "llama.cpp grammar": is_expression,
    "llama.cpp schema": is_product,
    "fireworks JSON mode": lambda text: isinstance(json.loads(text), dict),
    "fireworks schema": is_product,
    "sglang schema": is_product,
    "sglang schema in a string": is_product,
    "sglang regex": lambda text: text in ("Paris", "London"),
    "sglang ebnf": lambda text: text in ("Yes", "No"),
    "mistral.rs a tool": is_call,
}
"""Whether a text is what the example asks for."""


@pytest.mark.parametrize("example", HELD)
async def test_what_an_example_holds_its_text_to_is_kept(stack: Stack, example: str) -> None:
    """A text that was cut is the beginning of one. The bias has strings and objects end before they are cut."""
    body = {"model": "demo", **EXAMPLES[example], "max_tokens": 100, "temperature": 1, "n": 4, "seed": 11}
    choices = (await stack.post({**body, "logit_bias": {'"': 8, "}": 8}})).json()["choices"]
    for choice in choices:
        if choice["finish_reason"] != "length":
            assert HELD[example](choice["text"]), choice["text"]
            assert choice["finish_reason"] == ("tool_calls" if "tools" in body else "stop")
        elif example == "llama.cpp grammar":
            assert is_expression(choice["text"])
        else:
            reader = LiteralReader()
            reader.feed(choice["text"])
            assert reader.state == "open"
    is_endless = example == "llama.cpp grammar"
    assert is_endless or any(choice["finish_reason"] != "length" for choice in choices)


async def test_the_sample_of_mistral_rs_is_cut_before_all_that_its_grammar_allows(stack: Stack) -> None:
    body = {"model": "demo", **EXAMPLES["mistral.rs"], "stream": False}
    (choice,) = (await stack.post(body, dialect="mistral.rs")).json()["choices"]
    assert (choice["text"], choice["matched_stop"], choice["finish_reason"]) == ("", "example", "stop")


@pytest.mark.law("Nothing in silence")
@pytest.mark.parametrize("system", DOCUMENTED)
async def test_every_documented_parameter_is_known(system: str) -> None:
    assert set(DOCUMENTED[system].split()) <= set(PARAMETERS)


# Every parameter that a system documents, at its documented example or default.
WHOLE: dict[str, dict[str, Any]] = {
    "llama.cpp": {
        "prompt": "Once upon a time", "max_tokens": -1, "temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05,
        "stream": False, "stop": ["\n\n"], "presence_penalty": 0.0, "frequency_penalty": 0.0, "repeat_penalty": 1.1,
        "n": 1, "seed": -1, "logprobs": 5, "echo": False, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
        "grammar": "", "json_schema": {"type": "boolean"}, "cache_prompt": True, "suffix": "",
    },
    "mistral.rs": {
        "best_of": 1, "dry_allowed_length": 2, "dry_base": 1.75, "dry_multiplier": 0.8,
        "dry_sequence_breakers": ["\n", ":", "\"", "*"], "echo": False, "frequency_penalty": 0.1,
        "grammar": {"type": "regex", "value": "exam(ple)?"}, "logit_bias": {"5": 1},
        "logprobs": 1, "max_tokens": 16, "min_p": 0.05, "n": 1, "presence_penalty": 0.1,
        "prompt": "Say this is a test.", "repetition_penalty": 1.1, "stop": "example", "stream": False,
        "suffix": "null", "temperature": 0.7, "tool_choice": "auto",
        "tools": [{"type": "function", "function": {"name": "add_product"}}], "top_k": 32, "top_p": 0.9,
        "truncate_sequence": False, "user": "example",
    },
    "fireworks": {
        "prompt": "The sky is", "context_length_exceeded_behavior": "truncate", "echo": False, "frequency_penalty": 0,
        "ignore_eos": False, "images": [], "logprobs": 5, "max_tokens": 16, "mirostat_lr": 0.1, "mirostat_target": 1.5,
        "n": 1, "presence_penalty": 0, "repetition_penalty": 1,
        "response_format": {"type": "json_object", "schema": PRODUCT}, "stop": ["a", "b", "c", "d"], "stream": False,
        "temperature": 1, "top_k": 50, "top_p": 1, "user": "example",
    },
    "omlx": {
        "prompt": ["The quick brown fox", "The lazy dog"], "stream": False, "stream_options": {"include_usage": True},
        "max_tokens": 50, "temperature": 0.7, "top_p": 0.95, "min_p": 0.05, "stop": ["\n"], "seed": 7,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "xtc_probability": 0.5, "xtc_threshold": 0.1,
    },
    "sglang": {
        "prompt": ["Once upon", "a time"], "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
        "min_p": 0.0, "n": 2, "seed": 1, "stop": ["###"], "stop_token_ids": [300], "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "repetition_penalty": 1.0, "response_format": {"type": "text"}, "json_schema": "",
        "regex": "[ -~]*", "ebnf": None, "stream": False,
        "stream_options": {"include_usage": True, "continuous_usage_stats": False}, "echo": False, "logprobs": 2,
        "logit_bias": {"7": -1.5}, "best_of": 2, "ignore_eos": False, "skip_special_tokens": True,
        "no_stop_trim": False, "stop_regex": "[0-9]{3}", "min_tokens": 2, "lora_path": ["pirate", None],
        "suffix": "!", "return_hidden_states": False, "return_routed_experts": False,
        "return_cached_tokens_details": True,
    },
    "vllm": {
        "prompt": ["Once upon", "a time"], "echo": False, "frequency_penalty": 0.0, "logit_bias": {"7": -1.5},
        "logprobs": 2, "max_tokens": 16, "n": 2, "presence_penalty": 0.0, "seed": 1, "stop": [], "stream": False,
        "stream_options": None, "temperature": 1.0, "top_p": 1.0, "user": "example", "use_beam_search": False,
        "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "stop_token_ids": [],
        "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "truncate_prompt_tokens": 8, "truncation_side": "left",
        "allowed_token_ids": None, "prompt_logprobs": 1, "bad_words": ["bad"], "prompt_embeds": None,
        "add_special_tokens": True, "response_format": {"type": "text"},
        "structured_outputs": {"choice": ["positive", "negative"]}, "priority": 0, "request_id": "example",
        "return_token_ids": True, "return_tokens_as_token_ids": True, "cache_salt": "example",
        "kv_transfer_params": None, "vllm_xargs": None, "suffix": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("system", WHOLE)
async def test_one_request_with_every_documented_parameter_is_answered(stack: Stack, system: str) -> None:
    body = WHOLE[system]
    assert set(DOCUMENTED[system].split()) - {"model"} == set(body)
    for dialect in (system, "union"):
        response = await stack.post({"model": "demo", **body}, dialect=dialect)
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        num_prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
        assert [choice["index"] for choice in choices] == list(range(num_prompts * body.get("n", 1)))
        assert all(choice["finish_reason"] in {"stop", "length"} for choice in choices)
        assert all((choice["logprobs"] is not None) == ("logprobs" in body) for choice in choices)
