"""Parameters that are known and not carried out: those that would change an answer, and those that change none."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from serve_app.api.dispositions import Inert, NotYet

CHANGES_THE_ANSWER: Mapping[str, NotYet] = MappingProxyType(
    {
        "raw_output": NotYet(instead='Send "return_token_ids": true.'),
        "strict": NotYet(),
        "custom_logit_processor": NotYet(),
        "use_beam_search": NotYet(instead='Send "best_of".'),
        "num_beams": NotYet(0, 1, instead='Send "best_of".'),
        "min_length": NotYet(0, beside="min_tokens"),
        "ban_eos_token": NotYet(beside="ignore_eos"),
        "prompt_embeds": NotYet([]),
        "vllm_xargs": NotYet({}),
        "logprob_token_ids": NotYet(),
        "repetition_detection": NotYet(),
        "thinking_token_budget": NotYet(-1),
        "watermarking": NotYet(),
        "return_token_offsets": NotYet(),
        "routed_experts_prompt_start": NotYet(0),
        "guided_whitespace_pattern": NotYet(""),
        "banned_strings": NotYet([]),
        "banned_tokens": NotYet([], beside="logit_bias"),
        "custom_token_bans": NotYet("", [], beside="logit_bias"),
        "logits_processors": NotYet([]),
        "top_a": NotYet(0),
        "tfs": NotYet(1),
        "tfs_z": NotYet(1),
        "epsilon_cutoff": NotYet(0),
        "eta_cutoff": NotYet(0),
        "penalty_alpha": NotYet(0),
        "skew": NotYet(0),
        "no_repeat_ngram_size": NotYet(0),
        "encoder_repetition_penalty": NotYet(1),
        "smoothing_factor": NotYet(0),
        "guidance_scale": NotYet(1),
        "negative_prompt": NotYet(""),
        "dynamic_temperature": NotYet(beside="dynatemp_range"),
    }
)
"""Each is refused by name; its neutral values pass."""

CHANGES_NO_ANSWER: Mapping[str, Inert] = MappingProxyType(
    {
        # where and when it is computed, and what is kept of it
        **dict.fromkeys(
            (
                "models", "n_keep", "n_discard", "rid", "session_id", "routed_dp_rank", "bootstrap_host",
                "bootstrap_port", "bootstrap_room", "kv_transfer_params", "ec_transfer_params", "prompt_cache_key",
                "prompt_cache_options", "prompt_cache_retention", "service_tier", "store", "t_max_prompt_ms",
            ),
            Inert(),
        ),
        "id_slot": Inert((False, -1)),
        "priority": Inert((False, 0)),
        # for whom, and what the client notes about it
        **dict.fromkeys(("metadata", "safety_identifier"), Inert()),
        # how it is sent, or what is measured beside it
        **dict.fromkeys(("perf_metrics_in_response", "return_progress"), Inert()),
        "stream_interval": Inert((False, 1)),
        # of means that are not used here: beams, a processor of logits, a choice among compilers, a tokenizer's spaces
        **dict.fromkeys(("early_stopping", "custom_params", "guided_decoding_backend"), Inert()),
        "length_penalty": Inert((False, 1)),
        "spaces_between_special_tokens": Inert((False, True)),
        # of chats and of llama.cpp's own results; each is carried out where it says something
        **dict.fromkeys(("modalities", "reasoning_effort", "response_fields", "thinking", "verbosity"), Inert()),
    }
)  # fmt: skip
"""Each is accepted with any value, and told in X-Ignored-Parameters."""
