"""The table of every known request parameter and what this version does with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Carried:
    """Carried out; a field of `CompletionRequest`.

    allowed: what its value must be; `{limits.…}` names a configured bound
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

DRY_BREAKERS = ["\n", ":", '"', "*"]

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
        "max_tokens": Carried("an integer of at least 0, or -1 for no limit but the model's context"),
        "max_completion_tokens": Renamed("max_tokens"),
        "n_predict": Renamed("max_tokens"),
        "best_of": NotYet(1),
        # sampling
        "temperature": Carried("a number from 0 to 2"),
        "top_p": Carried("a number above 0 and at most 1"),
        "top_k": Carried("an integer of at least 1, or 0 or -1 to keep every token"),
        "min_p": Carried("a number from 0 to 1"),
        "seed": Carried("an integer of 64 bits, or -1 for a random one"),
        "typical_p": NotYet(1),
        "presence_penalty": NotYet(0),
        "frequency_penalty": NotYet(0),
        "repetition_penalty": NotYet(1),
        "repeat_penalty": Renamed("repetition_penalty"),
        "repeat_last_n": NotYet(-1, 0, 64),  # a window, without effect while no penalty is carried out
        "logit_bias": NotYet({}, []),
        "mirostat": NotYet(0),
        "mirostat_tau": NotYet(5.0),
        "mirostat_eta": NotYet(0.1),
        "mirostat_target": NotYet(),  # giving it switches Mirostat on
        "mirostat_lr": NotYet(0.1),
        "dry_multiplier": NotYet(0),
        "dry_base": NotYet(1.75),
        "dry_allowed_length": NotYet(2),
        "dry_sequence_breakers": NotYet(DRY_BREAKERS),
        "dry_penalty_last_n": NotYet(-1, 64),
        "xtc_probability": NotYet(0),
        "xtc_threshold": NotYet(0.1),
        "samplers": NotYet(),
        "min_keep": NotYet(0),
        "top_n_sigma": NotYet(-1),
        "dynatemp_range": NotYet(0),
        "dynatemp_exponent": NotYet(1),
        # stopping and length
        "stop": Carried(
            "a string or a list of at most {limits.max_stop_strings} strings, each of at most"
            " {limits.max_stop_chars} characters"
        ),
        "stop_token_ids": NotYet([]),
        "stop_regex": NotYet("", []),
        "no_stop_trim": NotYet(False),
        "include_stop_str_in_output": NotYet(False),
        "ignore_eos": NotYet(False),
        "min_tokens": NotYet(0),
        "truncate_sequence": NotYet(False),
        "context_length_exceeded_behavior": NotYet("truncate"),
        "n_keep": NotYet(0),
        "t_max_predict_ms": NotYet(0, -1),
        # what is returned
        "stream": Carried("a boolean"),
        "stream_options": Carried("an object with the booleans `include_usage` and `continuous_usage_stats`"),
        "echo": Carried("a boolean"),
        "echo_last": NotYet(0),
        "logprobs": Carried("an integer from 0 to {limits.max_logprobs}"),
        "n_probs": Renamed("logprobs", absent=(0,)),
        "top_logprobs": NotYet(),
        "post_sampling_probs": NotYet(False),
        "skip_special_tokens": NotYet(True),
        "return_token_ids": NotYet(False),
        "return_tokens": NotYet(False),
        "return_hidden_states": NotYet(False),
        "return_routed_experts": NotYet(False),
        "return_cached_tokens_details": NotYet(False),
        "return_progress": NotYet(False),
        "timings_per_token": NotYet(False),
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
        "lora": NotYet([], {}),
        # caches, placement, bookkeeping
        "cache_prompt": NotYet(True),
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
