"""Turns the sampling parameters that a client sent, in its dialect, into the engine's own."""

from __future__ import annotations

from serve_app.api.completion import CompletionRequest
from serve_app.api.error_text import shown
from serve_app.core.errors import InvalidRequest
from serve_app.core.request import DRY_BASE, DryParams, SamplingParams, UnencodedParams

SEED_MASK = 2**63 - 1
WHOLE_CONTEXT = 2**31 - 1
LOWEST_REPETITION_PENALTY = 0.01
"""Stands for all that is less: a division by 0 has no value."""


def lower_sampling(request: CompletionRequest, *, vocab_size: int) -> SamplingParams:
    """How tokens are chosen; the seed is the request's, or the one that it draws.

    Raises InvalidRequest for a biased token id that the model does not have, unless the dialect ignores it.
    """
    seed = request.seeded().seed
    assert seed is not None
    return SamplingParams(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        seed=seed & SEED_MASK,
        typical_p=request.typical_p,
        top_n_sigma=max(0.0, request.top_n_sigma),
        min_keep=request.min_keep,
        xtc_probability=request.xtc_probability,
        xtc_threshold=request.xtc_threshold,
        dynamic_temperature_range=request.dynatemp_range,
        dynamic_temperature_exponent=request.dynatemp_exponent,
        mirostat=request.mirostat or 0,
        mirostat_tau=request.mirostat_tau,
        mirostat_eta=request.mirostat_eta,
        samplers=request.samplers_in_order,
        repetition_penalty=max(LOWEST_REPETITION_PENALTY, request.repetition_penalty),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        penalty_window=WHOLE_CONTEXT if request.repeat_last_n == -1 else request.repeat_last_n,
        repetition_sees_prompt=request.dialect.repetition_sees_prompt,
        logit_bias=_biased_ids(request, vocab_size),
        allowed_token_ids=request.allowed_token_ids or (),
        dry=_dry(request),
    )


def unencoded(request: CompletionRequest) -> UnencodedParams:
    """What the tokenizer is still to make of it."""
    return UnencodedParams(
        logit_bias=tuple((key, bias) for key, bias in request.logit_bias if isinstance(key, str)),
        dry_breakers=request.dry_sequence_breakers if _dry(request) is not None else (),
        bad_words=request.bad_words,
    )


def _dry(request: CompletionRequest) -> DryParams | None:
    """A base below 1 would reward repetition; llama.cpp takes its default instead."""
    if request.dry_multiplier == 0 or request.dry_penalty_last_n == 0:
        return None
    return DryParams(
        multiplier=request.dry_multiplier,
        base=request.dry_base if request.dry_base >= 1 else DRY_BASE,
        allowed_length=request.dry_allowed_length,
        window=None if request.dry_penalty_last_n == -1 else request.dry_penalty_last_n,
    )


def _biased_ids(request: CompletionRequest, vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, bias in request.logit_bias:
        if isinstance(key, str):
            continue
        if 0 <= key < vocab_size:
            pairs.append((key, bias))
        elif not request.dialect.ignores_unknown_bias:
            must = f"name token ids from 0 to {vocab_size - 1}, or texts"
            raise InvalidRequest.refusing("logit_bias", must=must, found=f"the id {shown(key)}")
    return tuple(pairs)
