"""The settings of a completion under llama.cpp's names, as its `generation_settings` and `/props` tell them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects.listing import effective_defaults
from serve_app.api.dialects.tables import LLAMA_CPP
from serve_app.api.forms.form import Parameter
from serve_app.api.forms.strings import Paths
from serve_app.core.request import SamplerName, samplers_in_order

SAME_NAMES = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability",
    "xtc_threshold", "typical_p", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "mirostat_tau", "mirostat_eta", "max_tokens", "ignore_eos", "stream",
    "min_keep", "timings_per_token", "post_sampling_probs",
)  # fmt: skip
NOT_NATIVE = (
    "best_of", "prompt_logprobs", "request_id", "return_cached_tokens_details", "return_hidden_states",
    "return_routed_experts",
)  # fmt: skip
"""What llama.cpp's own shape has no place for."""
RESPONSE_FIELDS = Parameter(
    Paths(),
    "These fields alone are in a whole result, and in the last of a stream; `timings/predicted_n` is one of an object.",
)
LISTS = ("dry_sequence_breakers", "stop")
OTHER_NAMES: Mapping[str, str] = MappingProxyType({"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"})
WHERE_NONE: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "seed": ("seed", -1),
        "repeat_last_n": ("repeat_last_n", -1),
        "n_probs": ("logprobs", 0),
        "mirostat": ("mirostat", 0),
    }
)
"""Names with the parameter that each tells, and what stands where that has no value."""
MISSING = object()


def chosen_fields(result: Mapping[str, object], paths: Sequence[str]) -> dict[str, object]:
    """What of a result was asked for, each field by its path; what it does not have is left out."""
    if not paths:
        return dict(result)
    found = {}
    for path in paths:
        value: object = result
        for name in path.split("/"):
            value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
        if value is not MISSING:
            found[path] = value
    return found


def native_settings(request: CompletionRequest) -> dict[str, object]:
    """What a request was carried out with."""
    return {
        **_settings(request.model_dump(), request.samplers_in_order),
        "grammar": request.grammar.source if request.grammar is not None and request.grammar.kind == "gbnf" else "",
        "logit_bias": [{"token": key, "bias": False if math.isinf(bias) else bias} for key, bias in request.logit_bias],
        "lora": [{"id": number, "scale": scale} for number, scale in request.lora],
    }


def native_defaults() -> dict[str, object]:
    """What a request that says nothing is carried out with."""
    return {
        **_settings(
            effective_defaults(LLAMA_CPP), samplers_in_order(None, is_temperature_last=LLAMA_CPP.temperature_last)
        ),
        "grammar": "",
        "logit_bias": [],
        "lora": [],
    }


def _settings(values: Mapping[str, object], samplers: tuple[SamplerName, ...]) -> dict[str, object]:
    return {
        **{name: values[name] for name in SAME_NAMES},
        **{name: _as_list(values[name]) for name in LISTS},
        **{name: values[parameter] for name, parameter in OTHER_NAMES.items()},
        **{
            name: none if values[parameter] is None else values[parameter]
            for name, (parameter, none) in WHERE_NONE.items()
        },
        "samplers": list(samplers),
        "n_keep": 0,
        "n_discard": 0,
    }


def _as_list(value: object) -> list[object]:
    assert isinstance(value, Iterable)
    return list(value)
