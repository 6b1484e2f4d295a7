"""Refuses a request that needs what a replica's engine cannot do, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from serve_app.api.error_text import shown
from serve_app.core.cards import EVERYTHING, ModelCard, words_of
from serve_app.core.errors import UnsupportedParameter
from serve_app.core.names import ModelRef
from serve_app.core.request import TEMPERATURE_FIRST, GenerationRequest, RecordParams, SamplingParams, UnencodedParams

NEUTRAL: Mapping[str, Any] = MappingProxyType({each.name: each.default for each in fields(SamplingParams)})
"""The value of each parameter that switches it off."""
OTHER_PARAMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
        "dry": (),
        "typ_p": ("typical_p",),
        "xtc": ("xtc_probability",),
    }
)
"""Parameters of the samplers that are not called as their one parameter; DRY's are a type of their own."""
EDITS = ("penalties", "dry")
"""Samplers that change logits, and so the likeliest token, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Something that a request needs of an engine.

    kind:  of a capability;  param: by which the client asked for it
    off:   what the parameter must be without it
    """

    kind: str
    param: str
    found: object
    off: str = "be absent"


def check_capabilities(request: GenerationRequest, card: ModelCard, *, model_param: str) -> None:
    """Raise UnsupportedParameter for the first need of a request that the model's engine lacks.

    model_param: what the client calls the member that names adapters
    """
    capabilities = card.capabilities
    if capabilities == EVERYTHING:
        return
    for has, needs in (
        (capabilities.sampling, sampling_needs(request.sampling, request.unencoded)),
        (capabilities.constraints, _constraint_needs(request)),
        (capabilities.adapters, _adapter_needs(request.model, model_param)),
        (capabilities.recordings, _recording_needs(request.record)),
    ):
        for need in needs:
            if need.kind not in has:
                raise lacking(need, card)


def lacking(need: Need, card: ModelCard) -> UnsupportedParameter:
    """Return the refusal of a need that the model's engine lacks."""
    must = f"{need.off} for {card.name}, whose engine ({card.engine}) does not support {words_of(need.kind)}"
    return UnsupportedParameter.refusing(need.param, must=must, found=shown(need.found), remedy=remedy_of(card))


def remedy_of(card: ModelCard) -> str:
    """Return the way out of what the model's engine lacks; our own knows none."""
    return "" if card.engine == "own" else 'Its operator serves it with "engine: own" in its args.'


def sampling_needs(params: SamplingParams, texts: UnencodedParams) -> Iterator[Need]:
    """What sampling needs. Greedy sampling and Mirostat leave most samplers without effect."""
    active = EDITS if params.is_greedy else (*EDITS, "temperature") if params.mirostat else params.samplers
    needs: list[Need] = []
    for sampler in TEMPERATURE_FIRST:
        for param in OTHER_PARAMS.get(sampler, (sampler,)):
            value, neutral = getattr(params, param), NEUTRAL[param]
            if sampler in active and sampler in params.samplers and value != neutral:
                needs.append(Need(kind=sampler, param=param, found=value, off=f"be {neutral:g}"))
    if params.dry is not None and "dry" in params.samplers:
        needs.append(Need(kind="dry", param="dry_multiplier", found=params.dry.multiplier, off="be 0"))
    yield from needs
    if params.dynamic_temperature_range and not params.is_greedy:
        found = params.dynamic_temperature_range
        yield Need(kind="dynamic_temperature", param="dynatemp_range", found=found, off="be 0")
    if params.mirostat and not params.is_greedy:
        yield Need(kind="mirostat", param="mirostat", found=params.mirostat, off="be 0")
    for kind, values in (
        ("logit_bias", (*params.logit_bias, *texts.logit_bias)),
        ("allowed_token_ids", params.allowed_token_ids),
        ("bad_words", (*params.bad_words, *texts.bad_words)),
    ):
        if values:
            yield Need(kind=kind, param=kind, found=list(values))
    used = {need.kind for need in needs}
    order = [name for name in params.samplers if name in used]
    if order != [name for name in TEMPERATURE_FIRST if name in used]:
        off = "have the order " + ", ".join(TEMPERATURE_FIRST)
        yield Need(kind="sampler_order", param="samplers", found=list(params.samplers), off=off)


def _constraint_needs(request: GenerationRequest) -> Iterator[Need]:
    if (constraint := request.constraint) is not None:
        yield Need(kind=constraint.kind, param=constraint.name, found=constraint.source)


def _adapter_needs(model: ModelRef, param: str) -> Iterator[Need]:
    parts = model.parts
    if parts:
        kind = "mixed" if len(parts) > 1 else "plain" if parts[0].scale == 1 else "scaled"
        off = "name a base model" if kind == "plain" else "name one adapter without a scale"
        yield Need(kind=kind, param=param, found=model.name, off=off)


def _recording_needs(record: RecordParams | None) -> Iterator[Need]:
    if record is None:
        return
    if record.hidden_states is not None and record.embedding is None:
        yield Need(kind="hidden_states", param=record.name, found=True, off="be false")
    if record.experts:
        yield Need(kind="routed_experts", param="return_routed_experts", found=True, off="be false")
