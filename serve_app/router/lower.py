"""Turns what a client sent into one internal request per prompt."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from serve_app.api.chat import ChatRequest
from serve_app.api.completion import CompletionRequest
from serve_app.api.embeddings import EmbeddingRequest
from serve_app.api.error_text import shown
from serve_app.api.scoring import ClassifyRequest, ScoreRequest
from serve_app.catalog.resolve import Wanted, write_mix
from serve_app.core.cards import EXPERTS, STATES, ModelCard, RecordingKind
from serve_app.core.errors import AdapterNotFound, InvalidRequest, UnsupportedParameter
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Image, Prompt
from serve_app.core.request import (
    DRY_BASE,
    Constraint,
    ContextParams,
    DryParams,
    GenerationRequest,
    LogprobParams,
    RecordParams,
    SamplingParams,
    StopParams,
    UnencodedParams,
)
from serve_app.core.tenants import LOCAL, Tenant
from serve_app.router.capabilities import Need, check_capabilities, lacking, remedy_of
from serve_app.router.message import constraint_of, marks_to_show, writing_of
from serve_app.tools.forms import Form, call_constraint

CardOf = Callable[[ModelRef], ModelCard]


def new_response_id(prefix: str = "cmpl") -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


Resolve = Callable[[Wanted], ModelRef]


Target = tuple[ModelRef, ModelCard]
"""The model that a part is for, with its card."""


def lower(
    request: CompletionRequest,
    response_id: str,
    *,
    resolve: Resolve,
    card_of: CardOf,
    client_request_id: str = "",
    models: Sequence[ModelRef] = (),
    tenant: Tenant = LOCAL.tenant,
) -> tuple[GenerationRequest, ...]:
    """One request per model and prompt, the prompts of the first model first, each named `<response id>/<its place>`.

    What is asked of one model is what it would be if it were the only one.
    resolve: asked once per distinct model and adapter;  models: of the parts, where they are known already
    tenant:  of whose share they are; they find no prefix that others had computed, unless those share them with it

    Raises what `resolve` raises, InvalidRequest for a token id outside the vocabulary, for more tokens in all than one
    request may have and for completions that may become longer than the tenant's, AdapterNotFound for a number in
    `lora` that no adapter has, and UnsupportedParameter for what the engine of a model cannot do.
    """
    targets = tuple((each, card_of(each)) for each in models) or _targets(request, resolve, card_of)
    request = request.seeded()
    _check_amount(request, max_model_len=max(card.max_model_len for _, card in targets))
    of_bases: dict[str, GenerationRequest] = {}
    lowered = []
    for part, (model, card) in enumerate(targets):
        try:
            _check_images(request.images_of(part), card)
            _check_prompt_ids(request, part, vocab_size=card.vocab_size)
            if model.base not in of_bases:
                of_bases[model.base] = _lowered(request, model, card, client_request_id, tenant=tenant)
            one = replace(
                of_bases[model.base],
                request_id=f"{response_id}/{part}",
                model=model,
                prompt=_prompt(request, part),
                prompt_index=part % len(request.prompts),
            )
            check_capabilities(one, card, model_param=_adapter_param(request, part))
        except InvalidRequest as error:
            raise error.about(model.name) if request.listed else error from None
        lowered.append(one)
    return tuple(lowered)


def _lowered(
    request: CompletionRequest, model: ModelRef, card: ModelCard, client_request_id: str, *, tenant: Tenant
) -> GenerationRequest:
    """Return what is the same for every prompt and adapter of a base, its folder's recommendations among it."""
    _check_head(request, card, model)
    _check_ids(request, card.vocab_size)
    sampled = request.model_copy(update=request.defaults_of(card.default_sampling))
    writing = writing_of(card)
    return GenerationRequest(
        request_id="",
        model=model,
        prompt=Prompt(parts=()),
        n=request.num_candidates,
        sampling=lower_sampling(sampled, vocab_size=card.vocab_size),
        stop=_within(tenant.max_tokens, _stop(sampled), sampled),
        logprobs=_logprobs(request),
        echo=request.echo or request.echo_last > 0,
        echo_last=request.echo_last,
        reports_prompt_ids=request.return_token_ids,
        uses_cache=request.cache_prompt,
        cache_salt=_salt(tenant, request.cache_salt),
        skips_special_tokens=request.skip_special_tokens,
        shown_marks=marks_to_show(request, writing),
        constraint=_constraint(request, writing.calls),
        record=record_wanted(request, card),
        conversation=request.conversation(card),
        reports_tail=request.splits_reasoning and writing.thoughts.reads_prompt,
        is_read_whole=not request.stream,
        context=_context(request),
        unencoded=unencoded(request),
        infill=request.infill,
        prediction=request.expected,
        client_request_id=client_request_id,
        share=tenant.share,
    )


def _prompt(request: CompletionRequest, part: int) -> Prompt:
    prompt = request.prompt_of(part)
    return prompt if request.add_special_tokens else replace(prompt, adds_special=False)


def _targets(request: CompletionRequest, resolve: Resolve, card_of: CardOf) -> tuple[Target, ...]:
    """Return the model of each part, in order."""
    known: dict[tuple[int, str | None], Target] = {}
    targets = []
    for at in range(len(request.models)):
        for index in range(len(request.prompts)):
            key = (at, request.lora_path_of(index))
            if key not in known:
                model = _model(request, at, key[1], resolve=resolve, card_of=card_of)
                known[key] = model, card_of(model)
            targets.append(known[key])
    return tuple(targets)


def model_param(request: CompletionRequest, at: int) -> str:
    """Return the path of this model in the request, for messages."""
    return f"model[{at}]" if request.listed else "model"


def _adapter_param(request: CompletionRequest, part: int) -> str:
    """Return the parameter that named the adapters of a part."""
    if request.lora_path_of(part % len(request.prompts)) is not None:
        return "lora_path"
    if request.scales or request.adapter is not None:
        return "lora" if request.scales else "adapter"
    return model_param(request, part // len(request.prompts))


def _model(
    request: CompletionRequest, at: int, lora_path: str | None, *, resolve: Resolve, card_of: CardOf
) -> ModelRef:
    """Return the model that the name at this place means, with the adapters that other parameters name."""
    param, name = model_param(request, at), request.models[at]
    if request.adapter is None:
        model = resolve(Wanted(model=name, param=param, adapter=lora_path))
    else:  # its base need not be allowed by itself
        model = resolve(Wanted(model=name, param=param, adapter=request.adapter, adapter_param="adapter"))
    if request.scales and model.adapter is None:
        numbered = _numbered_adapters(request, card_of(model))
        return resolve(Wanted(model=model.base, param=param, adapter=numbered, adapter_param="lora"))
    if request.adapter is None:
        return model
    beside = resolve(Wanted(model=model.base, param=param, adapter=request.adapter, adapter_param="adapter"))
    if model.adapter is not None and beside != model:
        must = f'be absent beside "{param}", which selects "{model.adapter}" already, or be the same'
        raise InvalidRequest.refusing("adapter", must=must, found=shown(request.adapter))
    return beside


def _numbered_adapters(request: CompletionRequest, card: ModelCard) -> str:
    """Return the mix of the adapters that `lora` gives a scale by number."""
    adapters = card.usable_adapters
    highest = max(request.scales)
    if highest >= len(adapters):
        must = f'name adapters of "{card.name}" by their number, below {len(adapters)}'
        raise AdapterNotFound.refusing("lora", must=must, found=str(highest))
    return write_mix(tuple((adapters[number].name, scale) for number, scale in request.scales.items()))


def _stop(request: CompletionRequest) -> StopParams:
    return StopParams(
        max_tokens=None if request.max_tokens == -1 else request.max_tokens,
        strings=request.stop,
        token_ids=request.stop_token_ids,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        patterns=(*request.stop_regex, *_outdented(request.n_indent)),
        max_predict_s=request.t_max_predict_ms / 1000,
        shows_string=request.no_stop_trim,
        shows_pattern=request.no_stop_trim or request.dialect.keeps_regex_match,
    )


def _outdented(least: int) -> tuple[str, ...]:
    """Return the pattern of a line that is indented by fewer spaces or tabs than this; none if any indent may be."""
    return (rf"\n[ \t]{{0,{least - 1}}}[^ \t]",) if least else ()


def _within(most: int | None, stop: StopParams, request: CompletionRequest) -> StopParams:
    """Bound the length by the tenant's. Raises InvalidRequest if the client sent a larger one."""
    if most is None or (stop.max_tokens is not None and stop.max_tokens <= most):
        return stop
    if stop.max_tokens is not None and request.sends_max_tokens:
        must = f"be at most {most} with this key"
        raise InvalidRequest.refusing(request.max_tokens_name, must=must, found=str(stop.max_tokens))
    return replace(stop, max_tokens=most)


def _salt(tenant: Tenant, sent: str) -> str:
    """Return what goes into the hash of a prefix, so that no other tenant finds it."""
    if tenant is LOCAL.tenant:
        return sent
    return f"group {tenant.cache_group}\n{sent}" if tenant.cache_group else f"tenant {tenant.own}\n{sent}"


def _context(request: CompletionRequest) -> ContextParams:
    return ContextParams(
        truncates_prompt=request.truncate_sequence,
        max_prompt_tokens=0 if request.truncate_prompt_tokens == -1 else request.truncate_prompt_tokens,
        keeps_beginning=request.truncation_side == "right",
        shortens_completion=request.context_length_exceeded_behavior == "truncate",
        prompt_name=request.prompt_name,
        max_tokens_name=request.max_tokens_name,
    )


def _logprobs(request: CompletionRequest) -> LogprobParams | None:
    """Return which log-probabilities to compute; a ranking needs them, too."""
    top = 0 if request.logprobs is None and request.is_ranked else request.logprobs
    if top is None and request.prompt_logprobs is None:
        return None
    return LogprobParams(
        top=top,
        prompt=request.logprobs is not None and (request.echo or request.echo_last > 0),
        whole_prompt=request.prompt_logprobs,
        post_sampling=request.post_sampling_probs,
    )


def _constraint(request: CompletionRequest, form: Form) -> Constraint | None:
    """Return what each text has to be, with calls in the form that the model knows."""
    if not isinstance(request, ChatRequest):
        return constraint_of(request)
    return call_constraint(request.tool_use, form, request.constraint)


def _check_images(images: Sequence[Image], card: ModelCard) -> None:
    """Raise UnsupportedParameter if there are images and the model takes none."""
    if not images or (card.images is not None and card.images.takes_images):
        return
    why = "completes text only" if card.images is None else f"takes none here: {card.images.reason}"
    must = f"be absent for {card.name}, which {why}"
    remedy = "" if card.images is None else remedy_of(card)
    raise UnsupportedParameter.refusing(images[0].name, must=must, found="an image", remedy=remedy)


def _check_prompt_ids(request: CompletionRequest, part: int, *, vocab_size: int) -> None:
    ids = [each for each in request.prompt_of(part).parts if isinstance(each, tuple)]
    highest = max(map(max, ids), default=-1)
    if highest >= vocab_size:
        name = request.prompt_name
        path = name if len(request.prompts) == 1 else f"{name}[{part % len(request.prompts)}]"
        raise InvalidRequest.refusing(path, must=_hold_ids(vocab_size), found=str(highest))


def _check_ids(request: CompletionRequest, vocab_size: int) -> None:
    for name in ("stop_token_ids", "allowed_token_ids"):
        highest = max(getattr(request, name) or (), default=-1)
        if highest >= vocab_size:
            raise InvalidRequest.refusing(name, must=_hold_ids(vocab_size), found=str(highest))
    expected = request.expected
    if not isinstance(expected, str) and max(expected, default=-1) >= vocab_size:
        raise InvalidRequest.refusing("speculation", must=_hold_ids(vocab_size), found=str(max(expected)))


def _hold_ids(vocab_size: int) -> str:
    return f"hold token ids from 0 to {vocab_size - 1}, which are the model's vocabulary"


def _check_amount(request: CompletionRequest, *, max_model_len: int) -> None:
    """Bound the tokens of all completions together; none of them is longer than the context."""
    each = min(request.max_tokens, max_model_len)
    if request.num_choices * each > request.max_total_tokens:
        raise InvalidRequest.refusing(
            request.max_tokens_name,
            must=f"be such that completions times it are at most {request.max_total_tokens}",
            found=f"{request.num_choices} × {each}",
        )


SEED_MASK = 2**63 - 1
WHOLE_CONTEXT = 2**31 - 1
LOWEST_REPETITION_PENALTY = 0.01
"""Stands for all that is less: a division by 0 has no value."""


def lower_sampling(request: CompletionRequest, *, vocab_size: int) -> SamplingParams:
    """Return how tokens are chosen; the seed is the request's, or the one that it draws.

    A field of one name on the wire and in the engine is taken as it is.

    Raises InvalidRequest for a biased token id that the model does not have, unless the dialect ignores it.
    """
    seed = request.seeded().seed
    assert seed is not None
    own: dict[str, Any] = {
        "seed": seed & SEED_MASK,
        "top_n_sigma": max(0.0, request.top_n_sigma),
        "dynamic_temperature_range": request.dynatemp_range,
        "dynamic_temperature_exponent": request.dynatemp_exponent,
        "mirostat": request.mirostat or 0,
        "samplers": request.samplers_in_order,
        "repetition_penalty": max(LOWEST_REPETITION_PENALTY, request.repetition_penalty),
        "penalty_window": WHOLE_CONTEXT if request.repeat_last_n == -1 else request.repeat_last_n,
        "repetition_sees_prompt": request.dialect.repetition_sees_prompt,
        "logit_bias": _biased_ids(request, vocab_size),
        "allowed_token_ids": request.allowed_token_ids or (),
        "bad_words": (),
        "dry": _dry(request),
    }
    names = (field.name for field in fields(SamplingParams) if field.name not in own)
    return SamplingParams(**own, **{name: getattr(request, name) for name in names})


def unencoded(request: CompletionRequest) -> UnencodedParams:
    """Return the parameters that need the tokenizer."""
    return UnencodedParams(
        logit_bias=tuple((key, bias) for key, bias in request.logit_bias if isinstance(key, str)),
        dry_breakers=request.dry_sequence_breakers if _dry(request) is not None else (),
        bad_words=request.bad_words,
    )


def _dry(request: CompletionRequest) -> DryParams | None:
    """Return the parameters of DRY. The default replaces a base below 1, which would reward repetition."""
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


def record_wanted(request: CompletionRequest, card: ModelCard) -> RecordParams | None:
    """Return what to record; None for nothing. Raises UnsupportedParameter for what the operator does not allow."""
    if isinstance(request, EmbeddingRequest) and "embeddings" not in card.capabilities.recordings:
        raise lacking(Need(kind="embeddings", param="model", found=card.name, off="name another model"), card)
    if isinstance(request, ClassifyRequest) and request.needs_head:
        head = card.records.head
        assert head is not None, "it was checked"
        head = head if request.use_activation else replace(head, activation="none")
        return RecordParams(hidden_states=head.pooling, name=request.prompt_name, embedding=head)
    if isinstance(request, EmbeddingRequest):
        return _embedding(request, card)
    states, experts = request.return_hidden_states, request.return_routed_experts
    if not states and not experts:
        return None
    if states and STATES in card.records.refuses:
        raise _not_allowed(STATES, states, card, "hidden_states")
    if experts and EXPERTS in card.records.refuses:
        raise _not_allowed(EXPERTS, experts, card, "routed_experts")
    if not states:
        return RecordParams(experts=True, name=EXPERTS)
    if request.shows_last_state:
        return RecordParams(hidden_states="last", experts=experts, name=STATES)
    is_echoed = request.echo or request.echo_last > 0
    return RecordParams(
        hidden_states="all" if is_echoed else "drawn", echoed=request.echo_last, experts=experts, name=STATES
    )


def _check_head(request: CompletionRequest, card: ModelCard, model: ModelRef) -> None:
    """Raise UnsupportedParameter if the model's classification head, or none, does not fit the request."""
    head, is_scored = card.records.head, isinstance(request, ClassifyRequest) and request.needs_head
    if is_scored and head is None:
        must, found = "name a model with a classification head", f"{card.name}, whose checkpoint has none"
    elif is_scored and model.parts:
        must, found = "name a base model, as a classification head is computed without adapters", model.name
    elif isinstance(request, ScoreRequest) and head is not None and len(head.labels) > 1:
        must = "name a model whose classification head has one label, which is the score"
        found = f"{card.name}, whose head has {len(head.labels)}; /v1/classify gives the scores of all of them"
    elif head is not None and not isinstance(request, EmbeddingRequest):
        must = "name a model that completes text"
        found = f"{card.name}, whose checkpoint has a classification head instead"
    else:
        return
    raise UnsupportedParameter.refusing("model", must=must, found=found)


def _embedding(request: EmbeddingRequest, card: ModelCard) -> RecordParams:
    form = card.records.embedding
    if form is None or form.reason is not None:
        must, remedy = "name a model with embeddings", 'Its operator chooses what they are by "pooling" in its args.'
        found = f"{card.name}, which has none" + (f": {form.reason}" if form is not None else "")
        raise UnsupportedParameter.refusing("model", must=must, found=found, remedy=remedy)
    _check_dimensions(request.dimensions, card)
    if isinstance(request, ScoreRequest):  # a cosine is the product of vectors of length 1
        form = replace(form, normalizes=True)
    return RecordParams(
        hidden_states=form.pooling, name=request.prompt_name, dimensions=request.dimensions, embedding=form
    )


def _check_dimensions(wanted: int | None, card: ModelCard) -> None:
    """Check the size of vectors. Only a model that was trained for it has shorter ones."""
    allowed = sorted({*card.records.embedding_sizes, card.records.hidden_size} - {0})
    is_free = 0 in card.records.embedding_sizes and (wanted or 0) <= card.records.hidden_size
    if wanted is None or wanted in allowed or is_free:
        return
    must = (
        " or ".join(map(str, allowed))
        if 0 not in card.records.embedding_sizes
        else f"at most {card.records.hidden_size}"
    )
    raise InvalidRequest.refusing(
        "dimensions", must=f"be {must}, as {card.name} was trained for no others", found=str(wanted)
    )


def _not_allowed(name: str, found: object, card: ModelCard, kind: RecordingKind) -> UnsupportedParameter:
    if kind not in card.capabilities.recordings:
        return lacking(Need(kind=kind, param=name, found=found, off="be false"), card)
    return UnsupportedParameter.refusing(
        name,
        must=f"be false, as {card.name} is not configured to return them",
        found=shown(found),
        remedy=f'Its operator allows it with "{name}: true" in its args.',
    )
