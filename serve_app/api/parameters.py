"""The table of every known request parameter and what this version does with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Carried:
    """Carried out; a field of `CompletionRequest`.

    allowed: what its value must be; braces are filled in by serve_app.api.wording
    """

    allowed: str


@dataclass(frozen=True, slots=True)
class Renamed:
    """Another system's name for a parameter.

    absent: values that mean absence under this name, though not under the other
    """

    to: str
    absent: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """Checked, and by contract without any effect."""

    allowed: str
    why: str


class NotYet:
    """Known, not carried out: refused by name, unless its value is neutral, which changes nothing."""

    __slots__ = ("neutral",)

    def __init__(self, *neutral: object) -> None:
        self.neutral = neutral

    def __repr__(self) -> str:
        return f"NotYet{self.neutral!r}"


Disposition = Carried | Renamed | Accepted | NotYet


PARAMETERS: Mapping[str, Disposition] = MappingProxyType(
    {
        # what to complete, and with which model
        "model": Carried("a non-empty string of at most {limits.max_model_chars} characters"),
        "prompt": Carried(
            "a string, a list of token ids, a list that mixes both, or a list of at most {limits.max_prompts}"
            " such prompts"
        ),
        "lora_path": Carried("the name of an adapter, or a list with one name or null for each prompt"),
        "user": Accepted("a string", why="names the end user for abuse reports; the completion is the same"),
        # how much
        "n": Carried("an integer from 1 to {limits.max_n}"),
        "n_cmpl": Renamed("n"),
        "max_tokens": Carried("{dialect.max_tokens_range}"),
        "max_completion_tokens": Renamed("max_tokens"),
        "n_predict": Renamed("max_tokens"),
        "best_of": Carried("an integer from 1 to {limits.max_n}"),
        # sampling
        "temperature": Carried("a number from 0 to 2"),
        "top_p": Carried("a number above 0 and at most 1"),
        "top_k": Carried("an integer from 1 to {dialect.max_top_k}, or 0 or -1 to keep every token"),
        "min_p": Carried("a number from 0 to 1"),
        "seed": Carried("an integer of 64 bits, or -1 for a random one"),
        "typical_p": Carried("a number above 0 and at most 1"),
        "typ_p": Renamed("typical_p"),
        "top_n_sigma": Carried("a number; 0 or less keeps every token"),
        "min_keep": Carried("an integer of at least 0"),
        "samplers": Carried("a list of these names, each at most once: {samplers}"),
        "dynatemp_range": Carried("a number from 0 to 100"),
        "dynatemp_exponent": Carried("a number from 0 to 100"),
        "presence_penalty": Carried("a number from -2 to 2"),
        "frequency_penalty": Carried("a number from -2 to 2"),
        "repetition_penalty": Carried("a number above 0 and at most 100"),
        "repeat_penalty": Renamed("repetition_penalty"),
        "repeat_last_n": Carried("an integer of at least 0, or -1 for the whole context"),
        "logit_bias": Carried(
            "an object or a list of pairs, at most {limits.max_logit_bias} of them, from token ids or texts to"
            " numbers or false"
        ),
        "mirostat": Carried("0, 1 or 2"),
        "mirostat_tau": Carried("a number above 0 and at most 100"),
        "mirostat_target": Renamed("mirostat_tau", absent=(0,)),
        "mirostat_eta": Carried("a number above 0 and at most 100"),
        "mirostat_lr": Renamed("mirostat_eta"),
        "dry_multiplier": Carried("a number from 0 to 100"),
        "dry_base": Carried("a number from 0 to 100"),
        "dry_allowed_length": Carried("an integer of at least 0"),
        "dry_sequence_breakers": Carried(
            "a list of 1 to {limits.max_stop_strings} non-empty strings, each of at most {limits.max_stop_chars}"
            " characters"
        ),
        "dry_penalty_last_n": Carried("an integer of at least 0, or -1 for the whole context"),
        "xtc_probability": Carried("a number from 0 to 1"),
        "xtc_threshold": Carried("a number from 0 to 1"),
        # stopping and length
        "stop": Carried(
            "a string or a list of at most {max_stop_strings} strings, each of at most"
            " {limits.max_stop_chars} characters"
        ),
        "stop_token_ids": Carried("a list of at most {limits.max_stop_token_ids} token ids"),
        "stop_regex": Carried(
            "a regular expression or a list of at most {limits.max_stop_strings} of them, each of at most"
            " {limits.max_stop_chars} characters"
        ),
        "no_stop_trim": Carried("a boolean"),
        "include_stop_str_in_output": Renamed("no_stop_trim"),
        "ignore_eos": Carried("a boolean"),
        "min_tokens": Carried("an integer of at least 0"),
        "truncate_sequence": Carried("a boolean"),
        "context_length_exceeded_behavior": Carried('"truncate" or "error"'),
        "n_keep": NotYet(0),
        "t_max_predict_ms": NotYet(0, -1),
        # what is returned
        "stream": Carried("a boolean"),
        "stream_options": Carried("an object with the booleans `include_usage` and `continuous_usage_stats`"),
        "echo": Carried("a boolean"),
        "echo_last": Carried("an integer of at least 0"),
        "logprobs": Carried("an integer from 0 to {limits.max_logprobs}, or a boolean"),
        "n_probs": Renamed("logprobs", absent=(0,)),
        "top_logprobs": Carried("an integer from 0 to {limits.max_logprobs}"),
        "post_sampling_probs": Carried("a boolean"),
        "skip_special_tokens": Carried("a boolean"),
        "return_token_ids": Carried("a boolean"),
        "return_tokens": Renamed("return_token_ids"),
        "return_hidden_states": NotYet(False),
        "return_routed_experts": NotYet(False),
        "return_cached_tokens_details": Carried("a boolean"),
        "return_progress": NotYet(False),
        "timings_per_token": Carried("a boolean"),
        "response_fields": NotYet([]),
        "perf_metrics_in_response": NotYet(False),
        "raw_output": NotYet(False),
        # infilling, structure, tools, images
        "suffix": NotYet(""),
        "grammar": NotYet(""),
        "json_schema": NotYet(),
        "regex": NotYet(),
        "ebnf": NotYet(),
        "response_format": NotYet({"type": "text"}),
        "tools": NotYet([]),
        "tool_choice": NotYet("none", "auto"),
        "strict": NotYet(False),
        "images": NotYet([]),
        "reasoning_effort": NotYet(),
        "thinking": NotYet(),
        # adapters under other names
        "adapter": NotYet(),
        "lora": Carried("a list of objects with `id` and `scale`"),
        # caches, placement, bookkeeping
        "cache_prompt": Carried("a boolean"),
        "cache_salt": NotYet(""),
        "extra_key": NotYet(""),
        "prompt_cache_key": NotYet(""),
        "prompt_cache_isolation_key": NotYet(""),
        "id_slot": NotYet(-1),
        "priority": NotYet(0),
        "rid": NotYet(),
        "session_id": NotYet(),
        "service_tier": NotYet("auto", "default"),
        "metadata": NotYet({}),
        "speculation": NotYet(),
        "prediction": NotYet(),
        "custom_params": NotYet({}),
        "custom_logit_processor": NotYet(),
        "bootstrap_host": NotYet(),
        "bootstrap_port": NotYet(),
        "bootstrap_room": NotYet(),
        "routed_dp_rank": NotYet(),
    }
)

STREAM_OPTIONS: Mapping[str, Disposition] = MappingProxyType(
    {
        "include_usage": Carried("a boolean"),
        "continuous_usage_stats": Carried("a boolean"),
    }
)
