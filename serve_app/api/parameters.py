"""The table of every known request parameter and what this version does with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Carried:
    """Carried out; a field of `CompletionRequest`.

    allowed: what its value must be, where that is more than its field says; serve_app.api.wording fills in the braces
    besides: what is said after the words of its field
    """

    allowed: str = ""
    besides: str = ""


@dataclass(frozen=True, slots=True)
class Renamed:
    """Another system's name for a parameter.

    absent: values that mean absence under this name, though not under the other
    besides: what this name does that the other does not
    """

    to: str
    absent: tuple[object, ...] = ()
    besides: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Checked, and by contract without any effect."""

    why: str
    allowed: str = ""
    besides: str = ""


class NotYet:
    """Known, not carried out: refused by name, unless its value is neutral, which changes nothing; false always is."""

    __slots__ = ("neutral",)

    def __init__(self, *neutral: object) -> None:
        self.neutral = (False, *(value for value in neutral if value is not False))

    def __repr__(self) -> str:
        return f"NotYet{self.neutral!r}"


Disposition = Carried | Renamed | Accepted | NotYet


PARAMETERS: Mapping[str, Disposition] = MappingProxyType(
    {
        # what to complete, and with which model
        "model": Carried("a non-empty string of at most {bounds.model} characters"),
        "prompt": Carried(
            "a string, a list of token ids, a list that mixes both, or a list of at most {limits.max_prompts}"
            " such prompts"
        ),
        "lora_path": Carried("the name of an adapter, or a list with one name or null for each prompt"),
        "user": Accepted(why="names the end user for abuse reports; the completion is the same"),
        # how much
        "n": Carried("an integer from 1 to {bounds.n}"),
        "n_cmpl": Renamed("n"),
        "max_tokens": Carried("{dialect.max_tokens_range}"),
        "max_completion_tokens": Renamed("max_tokens"),
        "n_predict": Renamed("max_tokens"),
        "best_of": Carried("an integer from 1 to {bounds.n}"),
        # sampling
        "temperature": Carried(),
        "top_p": Carried(besides="; 0 keeps the likeliest token alone"),
        "top_k": Carried("an integer from 1 to {bounds.top_k}, or 0 or -1 to keep every token"),
        "min_p": Carried(),
        "seed": Carried("an integer of 64 bits, or -1 for a random one"),
        "typical_p": Carried(),
        "typ_p": Renamed("typical_p"),
        "top_n_sigma": Carried("a number; 0 or less keeps every token"),
        "min_keep": Carried(),
        "samplers": Carried("a list of these names, each at most once: {samplers}"),
        "dynatemp_range": Carried(),
        "dynatemp_exponent": Carried(),
        "presence_penalty": Carried(),
        "frequency_penalty": Carried(),
        "repetition_penalty": Carried(besides="; what is below 0.01 counts as 0.01"),
        "repeat_penalty": Renamed("repetition_penalty"),
        "repeat_last_n": Carried("an integer of at least 0, or -1 for the whole context"),
        "logit_bias": Carried(
            "an object or a list of pairs, at most {limits.max_logit_bias} of them, from token ids or texts to"
            " numbers or false"
        ),
        "mirostat": Carried("0, 1 or 2"),
        "mirostat_tau": Carried(),
        "mirostat_target": Renamed(
            "mirostat_tau", absent=(0,), besides="It switches Mirostat 2 on, unless `mirostat` is sent; 0 is absence."
        ),
        "mirostat_eta": Carried(),
        "mirostat_lr": Renamed("mirostat_eta"),
        "dry_multiplier": Carried(),
        "dry_base": Carried(),
        "dry_allowed_length": Carried(),
        "dry_sequence_breakers": Carried(
            "a list of 1 to {limits.max_stop_strings} non-empty strings, each of at most {limits.max_stop_chars}"
            " characters"
        ),
        "dry_penalty_last_n": Carried("an integer of at least 0, or -1 for the whole context"),
        "xtc_probability": Carried(),
        "xtc_threshold": Carried(),
        # stopping and length
        "stop": Carried(
            "a string or a list of at most {bounds.stop} strings, each of at most {limits.max_stop_chars} characters"
        ),
        "stop_token_ids": Carried("a list of at most {limits.max_stop_token_ids} token ids"),
        "stop_regex": Carried(
            "a regular expression or a list of at most {limits.max_stop_strings} of them, each of at most"
            " {limits.max_stop_chars} characters"
        ),
        "no_stop_trim": Carried(),
        "include_stop_str_in_output": Renamed("no_stop_trim"),
        "ignore_eos": Carried(),
        "min_tokens": Carried(),
        "truncate_sequence": Carried(),
        "context_length_exceeded_behavior": Carried(),
        "n_keep": NotYet(0),
        "t_max_predict_ms": NotYet(0, -1),
        # what is returned
        "stream": Carried(),
        "stream_options": Carried("an object with the booleans `include_usage` and `continuous_usage_stats`"),
        "echo": Carried(),
        "echo_last": Carried(),
        "logprobs": Carried("an integer from 0 to {bounds.logprobs}, or a boolean"),
        "n_probs": Renamed("logprobs", absent=(0,), besides="0 is absence."),
        "top_logprobs": Carried("an integer from 0 to {bounds.logprobs}"),
        "post_sampling_probs": Carried(),
        "skip_special_tokens": Carried(),
        "return_token_ids": Carried(),
        "return_tokens": Renamed("return_token_ids"),
        "return_hidden_states": NotYet(False),
        "return_routed_experts": NotYet(False),
        "return_cached_tokens_details": Carried(),
        "return_progress": NotYet(False),
        "timings_per_token": Carried(),
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
        "cache_prompt": Carried(),
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
        "store": NotYet(False),
        "bootstrap_host": NotYet(),
        "bootstrap_port": NotYet(),
        "bootstrap_room": NotYet(),
        "routed_dp_rank": NotYet(),
        # what other servers and their front ends know beside these; each would change the text
        "use_beam_search": NotYet(False),
        "num_beams": NotYet(0, 1),
        "length_penalty": NotYet(1),
        "early_stopping": NotYet(False),
        "min_length": NotYet(0),
        "ban_eos_token": NotYet(False),
        "add_bos_token": NotYet(True),
        "add_special_tokens": NotYet(True),
        "spaces_between_special_tokens": NotYet(True),
        "truncate_prompt_tokens": NotYet(),
        "prompt_embeds": NotYet(),
        "prompt_logprobs": NotYet(),
        "allowed_token_ids": NotYet([]),
        "bad_words": NotYet([]),
        "banned_strings": NotYet([]),
        "banned_tokens": NotYet([]),
        "custom_token_bans": NotYet(""),
        "logits_processors": NotYet([]),
        "guided_json": NotYet(),
        "guided_regex": NotYet(""),
        "guided_choice": NotYet([]),
        "guided_grammar": NotYet(""),
        "structured_outputs": NotYet(),
        "grammar_string": NotYet(""),
        "top_a": NotYet(0),
        "tfs": NotYet(1),
        "tfs_z": NotYet(1),
        "typical": NotYet(1),
        "epsilon_cutoff": NotYet(0),
        "eta_cutoff": NotYet(0),
        "penalty_alpha": NotYet(0),
        "skew": NotYet(0),
        "no_repeat_ngram_size": NotYet(0),
        "encoder_repetition_penalty": NotYet(1),
        "repetition_penalty_range": NotYet(0),
        "smoothing_factor": NotYet(0),
        "guidance_scale": NotYet(1),
        "negative_prompt": NotYet(""),
        "dynamic_temperature": NotYet(False),
        "mirostat_mode": NotYet(0),
        "temperature_last": NotYet(False),
    }
)

STREAM_OPTIONS: Mapping[str, Disposition] = MappingProxyType(
    {
        "include_usage": Carried("a boolean"),
        "continuous_usage_stats": Carried("a boolean"),
        "include_obfuscation": NotYet(False),
    }
)
