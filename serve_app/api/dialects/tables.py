"""The dialects, one table each; docs/contract.md#dialects shows them side by side."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from serve_app.api.dialects.dialect import ONLY_MODEL, BestOf, Dialect, ErrorShape, Suffix, frozen
from serve_app.api.shown import shown
from serve_app.core.errors import InvalidRequest

HEADER = "X-Completions-Dialect"

UNION = Dialect(name="union", takes_unlimited_tokens=True, takes_model_defaults=True)

OPENAI = Dialect(
    name="openai",
    defaults=frozen({"context_length_exceeded_behavior": "error"}),
    max_stop_strings=4,
    takes_mixed_prompts=False,
    stream_options_need_stream=True,
    continuous_usage_needs_usage=True,
    chunks_have_null_usage=True,
    refuses_unknown=True,
    error_shape=ErrorShape.OPENAI,
)

LLAMA_CPP = Dialect(
    name="llama.cpp",
    defaults=frozen(
        {
            "max_tokens": -1,
            "temperature": 0.8,
            "top_p": 0.95,
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "repeat_last_n": 64,
        }
    ),
    temperature_last=True,
    takes_unlimited_tokens=True,
    finish_chunk_has_usage=True,
    has_timings=True,
    ignores_unknown_bias=True,
    takes_any_model=True,
    precedence=("n_predict", "max_completion_tokens", "max_tokens"),
    overruled_constraints=tuple(
        ("grammar", other)
        for other in ("json_schema", "response_format", "regex", "ebnf", "guided_choice", "structured_outputs")
    ),
)

MISTRAL_RS = Dialect(
    name="mistral.rs",
    defaults=frozen({"max_tokens": -1}),
    takes_zero_tokens=False,
    max_logprobs=20,
    best_of=BestOf.RETURNED,
    suffix=Suffix.APPEND,
    default_model=ONLY_MODEL,
    error_shape=ErrorShape.MESSAGE,
    statuses=MappingProxyType({"malformed_json": 400, "400": 422, "adapter_not_found": 422}),
)

FIREWORKS = Dialect(
    name="fireworks",
    defaults=frozen({"mirostat_tau": 1.5, "no_stop_trim": True}),
    takes_zero_tokens=False,
    max_stop_strings=4,
    max_top_k=128,
    max_repetition_penalty=2,
    takes_mixed_prompts=False,
    finish_chunk_has_usage=True,
    refuses_unknown=True,
)

OMLX = Dialect(
    name="omlx",
    defaults=frozen({"max_tokens": 32768, "top_p": 0.95}),
    temperature_last=True,
    repetition_sees_prompt=False,
    takes_mixed_prompts=False,
)

SGLANG = Dialect(
    name="sglang",
    defaults=frozen({"context_length_exceeded_behavior": "error"}),
    repetition_sees_prompt=False,
    takes_zero_tokens=False,
    max_logprobs=20,
    max_repetition_penalty=2,
    suffix=Suffix.APPEND,
    takes_mixed_prompts=False,
    returns_last_state=True,
    takes_model_defaults=True,
    keeps_regex_match=True,
    overruled_constraints=(("response_format", "json_schema"),),
    error_shape=ErrorShape.FLAT,
    statuses=MappingProxyType({"adapter_not_found": 400}),
)

VLLM = Dialect(
    name="vllm",
    defaults=frozen({"context_length_exceeded_behavior": "error"}),
    max_logprobs=20,
    takes_mixed_prompts=False,
    stream_options_need_stream=True,
    continuous_usage_needs_usage=True,
    has_stop_reason=True,
    takes_model_defaults=True,
    error_shape=ErrorShape.VLLM,
)

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {each.name: each for each in (UNION, OPENAI, LLAMA_CPP, MISTRAL_RS, FIREWORKS, OMLX, SGLANG, VLLM)}
)


def dialect_named(name: str) -> Dialect:
    """The dialect that a client asked for by header, in any case. Raises InvalidRequest."""
    dialect = DIALECTS.get(name.strip().lower())
    if dialect is None:
        raise InvalidRequest.refusing(HEADER, must=f"be one of {', '.join(DIALECTS)}", found=shown(name))
    return dialect
