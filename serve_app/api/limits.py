"""Bounds on what one request may ask for, so that nothing large is built before it was counted."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.bounded import PositiveInt

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_TOKEN_ID = INT32_MAX


@dataclass(frozen=True, kw_only=True)  # no slots, so that what a cluster file says can inherit the fields
class WireLimits:
    """What the server takes from one request.

    max_depth:         nesting of the JSON body
    max_model_chars:   characters of `model`
    max_models:        elements of a list of models
    max_prompts:       elements of a list of prompts
    max_inputs:        elements of a list of inputs that are embedded or scored
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

    max_depth: PositiveInt = 64
    max_model_chars: PositiveInt = 512
    max_models: PositiveInt = 16
    max_prompts: PositiveInt = 256
    max_inputs: PositiveInt = 1024
    max_prompt_chars: PositiveInt = 4_000_000
    max_prompt_ids: PositiveInt = 1_000_000
    max_messages: PositiveInt = 4096
    max_n: PositiveInt = 128
    max_choices: PositiveInt = 2048
    max_total_tokens: PositiveInt = 16_777_216
    max_logprobs: PositiveInt = 5
    max_stop_strings: PositiveInt = 64
    max_stop_chars: PositiveInt = 1024
    max_stop_token_ids: PositiveInt = 1024
    max_logit_bias: PositiveInt = 16_384
    max_extra_files: PositiveInt = 256
    max_constraint_chars: PositiveInt = 262_144
    max_images: PositiveInt = 32
    max_image_bytes: PositiveInt = 10_485_760


DEFAULT_LIMITS = WireLimits()
