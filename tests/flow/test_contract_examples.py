"""The examples that the five systems document work as written, but for the model's name (part two's excepted)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from serve_app.api.dialects.tables import DIALECTS
from serve_app.api.parameters import PARAMETERS
from tests.flow.stack import Stack, running_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES: dict[str, dict[str, Any]] = {
    "llama.cpp": {"prompt": "Once upon a time", "max_tokens": 50, "temperature": 0.7},
    "llama.cpp logprobs": {"prompt": "The sky is", "max_tokens": 5, "logprobs": 3},
    "llama.cpp batch": {
        "prompt": ["The capital of France is", "The capital of Germany is", "The capital of Italy is"],
        "max_tokens": 5,
    },
    "llama.cpp mirostat": {
        "prompt": "Write a creative story:", "max_tokens": 200, "mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
    },
    "mistral.rs, its grammar left out": {
        "best_of": 1, "dry_allowed_length": None, "dry_base": None, "dry_multiplier": None,
        "dry_sequence_breakers": None, "echo": False, "frequency_penalty": None, "logit_bias": None, "logprobs": None,
        "max_tokens": 16, "min_p": None, "n": 1, "presence_penalty": None, "prompt": "Say this is a test.",
        "repetition_penalty": None, "stop": "example", "stream": True, "suffix": None, "temperature": 0.7,
        "tool_choice": "none", "tools": None, "top_k": None, "top_p": None, "truncate_sequence": None,
        "user": "example",
    },
    "omlx": {"prompt": "The quick brown fox", "max_tokens": 50, "temperature": 0.7},
}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("example", EXAMPLES)
async def test_a_documented_example_is_answered_in_every_dialect(stack: Stack, example: str, dialect: str) -> None:
    response = await stack.post({"model": "demo", **EXAMPLES[example]}, dialect=dialect)
    assert response.status_code == 200, response.text


DOCUMENTED = {
    "llama.cpp": "model prompt max_tokens temperature top_p top_k min_p stream stop presence_penalty frequency_penalty"
    " repeat_penalty n seed logprobs echo suffix mirostat mirostat_tau mirostat_eta grammar json_schema cache_prompt",
    "mistral.rs": "best_of dry_allowed_length dry_base dry_multiplier dry_sequence_breakers echo frequency_penalty"
    " grammar logit_bias logprobs max_tokens min_p model n presence_penalty prompt repetition_penalty stop stream"
    " suffix temperature tool_choice tools top_k top_p truncate_sequence user",
    "fireworks": "model prompt context_length_exceeded_behavior echo frequency_penalty ignore_eos images logprobs"
    " max_tokens mirostat_lr mirostat_target n presence_penalty repetition_penalty response_format stop stream"
    " temperature top_k top_p user",
    "omlx": "model prompt stream stream_options max_tokens temperature top_p min_p stop seed presence_penalty"
    " frequency_penalty xtc_probability xtc_threshold",
    "sglang": "model prompt max_tokens temperature top_p top_k min_p n seed stop stop_token_ids frequency_penalty"
    " presence_penalty repetition_penalty response_format json_schema regex ebnf stream stream_options echo logprobs"
    " logit_bias best_of suffix ignore_eos skip_special_tokens no_stop_trim stop_regex min_tokens lora_path"
    " return_hidden_states return_routed_experts return_cached_tokens_details",
}


@pytest.mark.parametrize("system", DOCUMENTED)
async def test_every_documented_parameter_is_known(system: str) -> None:
    assert set(DOCUMENTED[system].split()) <= set(PARAMETERS)
