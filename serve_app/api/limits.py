"""Bounds on what one request may ask for, so that nothing large is built before it was counted."""

from __future__ import annotations

from dataclasses import dataclass

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_TOKEN_ID = INT32_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """What the server takes from one request.

    max_depth:         nesting of the JSON body
    max_model_chars:   characters of `model`
    max_models:        elements of a list of models
    max_prompts:       elements of a list of prompts
    max_inputs:        elements of a list of inputs that are embedded
    max_prompt_chars:  characters of one prompt's text parts together
    max_prompt_ids:    token ids in one prompt
    max_messages:      of a chat, whose characters together are bounded as a prompt's
    max_n:             `n` and `best_of`
    max_choices:       prompts times the completions computed for each, times the models
    max_total_tokens:  that number times `max_tokens`, or times the model's context where that is less
    max_logprobs:      likeliest tokens per position; a dialect may allow more
    max_stop_strings, max_stop_chars: how many stop strings (also patterns, also breakers of DRY), and how long each
    max_stop_token_ids, max_logit_bias: elements of these lists
    max_extra_files:   beside a gap
    max_constraint_chars: of a grammar, a schema or a regular expression that a text has to follow
    max_images, max_image_bytes: images of all prompts together, and how large the file of each
    """

    max_depth: int = 64
    max_model_chars: int = 512
    max_models: int = 16
    max_prompts: int = 256
    max_inputs: int = 1024
    max_prompt_chars: int = 4_000_000
    max_prompt_ids: int = 1_000_000
    max_messages: int = 4096
    max_n: int = 128
    max_choices: int = 2048
    max_total_tokens: int = 16_777_216
    max_logprobs: int = 5
    max_stop_strings: int = 64
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 16_384
    max_extra_files: int = 256
    max_constraint_chars: int = 262_144
    max_images: int = 32
    max_image_bytes: int = 10_485_760


DEFAULT_LIMITS = WireLimits()
