"""Turns what a client sent into one internal request per prompt."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from serve_app.api.completion import CompletionRequest
from serve_app.core.cards import ModelCard
from serve_app.core.errors import AdapterNotFound, InvalidRequest
from serve_app.core.names import ModelRef
from serve_app.core.request import ContextParams, GenerationRequest, LogprobParams, Prompt, SamplingParams, StopParams
from serve_app.router.sampling import lower_sampling, unencoded

Resolve = Callable[[str, str | None], ModelRef]
CardOf = Callable[[ModelRef], ModelCard]


def new_response_id() -> str:
    return f"cmpl-{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that a prompt is for, with its card."""

    model: ModelRef
    card: ModelCard


Targets = Mapping[str | None, Target]
"""By `lora_path`."""


def lower(
    request: CompletionRequest, response_id: str, *, resolve: Resolve, card_of: CardOf
) -> tuple[GenerationRequest, ...]:
    """One request per prompt, in order, named `<response id>/<prompt index>`.

    resolve: (`model`, `lora_path`) to the model meant; asked once per distinct pair

    Raises what `resolve` raises, InvalidRequest for a token id outside the vocabulary and for more tokens in all than
    one request may have, and AdapterNotFound for a number in `lora` that no adapter has.
    """
    targets = _targets(request, resolve, card_of)
    for index, prompt in enumerate(request.prompts):
        vocab_size = targets[request.lora_path_of(index)].card.vocab_size
        _check_prompt_ids(prompt, index, request=request, vocab_size=vocab_size)
    vocab_size = min(target.card.vocab_size for target in targets.values())
    _check_ids(request, vocab_size)
    _check_amount(request, max_model_len=max(target.card.max_model_len for target in targets.values()))
    return _lowered(request, response_id, targets, lower_sampling(request, vocab_size=vocab_size))


def _lowered(
    request: CompletionRequest, response_id: str, targets: Targets, sampling: SamplingParams
) -> tuple[GenerationRequest, ...]:
    """What is the same for every prompt is made once."""
    stop, logprobs, context, texts = _stop(request), _logprobs(request), _context(request), unencoded(request)
    return tuple(
        GenerationRequest(
            request_id=f"{response_id}/{index}",
            model=targets[request.lora_path_of(index)].model,
            prompt=prompt if request.add_special_tokens else replace(prompt, adds_special=False),
            prompt_index=index,
            n=request.num_candidates,
            sampling=sampling,
            stop=stop,
            logprobs=logprobs,
            echo=request.echo or request.echo_last > 0,
            echo_last=request.echo_last,
            reports_prompt_ids=request.return_token_ids,
            uses_cache=request.cache_prompt,
            cache_salt=request.cache_salt,
            skips_special_tokens=request.skip_special_tokens,
            constraint=request.constraint,
            context=context,
            unencoded=texts,
        )
        for index, prompt in enumerate(request.prompts)
    )


def _targets(request: CompletionRequest, resolve: Resolve, card_of: CardOf) -> Targets:
    """By `lora_path`, for every one that a prompt has."""
    targets: dict[str | None, Target] = {}
    for index in range(len(request.prompts)):
        lora_path = request.lora_path_of(index)
        if lora_path not in targets:
            model = resolve(request.model, lora_path)
            if request.lora and model.adapter is None:
                model = resolve(model.base, _numbered_adapter(request, card_of(model)))
            targets[lora_path] = Target(model=model, card=card_of(model))
    return targets


def _numbered_adapter(request: CompletionRequest, card: ModelCard) -> str:
    """The name of the adapter that `lora` switches on by its number."""
    number, _ = request.lora[0]
    adapters = card.usable_adapters
    if number >= len(adapters):
        must = f'name adapters of "{card.name}" by their number, below {len(adapters)}'
        raise AdapterNotFound.refusing("lora", must=must, found=str(number))
    return adapters[number].name


def _stop(request: CompletionRequest) -> StopParams:
    return StopParams(
        max_tokens=None if request.max_tokens == -1 else request.max_tokens,
        strings=request.stop,
        token_ids=request.stop_token_ids,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        patterns=request.stop_regex,
        shows_string=request.no_stop_trim,
        shows_pattern=request.no_stop_trim or request.dialect.keeps_regex_match,
    )


def _context(request: CompletionRequest) -> ContextParams:
    return ContextParams(
        truncates_prompt=request.truncate_sequence,
        max_prompt_tokens=0 if request.truncate_prompt_tokens == -1 else request.truncate_prompt_tokens,
        keeps_beginning=request.truncation_side == "right",
        shortens_completion=request.context_length_exceeded_behavior == "truncate",
        max_tokens_name=request.max_tokens_name,
    )


def _logprobs(request: CompletionRequest) -> LogprobParams | None:
    """Also where nothing but a ranking needs them."""
    top = 0 if request.logprobs is None and request.is_ranked else request.logprobs
    if top is None and request.prompt_logprobs is None:
        return None
    return LogprobParams(
        top=top,
        prompt=request.logprobs is not None and (request.echo or request.echo_last > 0),
        whole_prompt=request.prompt_logprobs,
        post_sampling=request.post_sampling_probs,
    )


def _check_prompt_ids(prompt: Prompt, index: int, *, request: CompletionRequest, vocab_size: int) -> None:
    highest = max((max(part) for part in prompt.parts if isinstance(part, tuple)), default=-1)
    if highest >= vocab_size:
        path = "prompt" if len(request.prompts) == 1 else f"prompt[{index}]"
        raise InvalidRequest.refusing(path, must=_hold_ids(vocab_size), found=str(highest))


def _check_ids(request: CompletionRequest, vocab_size: int) -> None:
    for name in ("stop_token_ids", "allowed_token_ids"):
        highest = max(getattr(request, name), default=-1)
        if highest >= vocab_size:
            raise InvalidRequest.refusing(name, must=_hold_ids(vocab_size), found=str(highest))


def _hold_ids(vocab_size: int) -> str:
    return f"hold token ids from 0 to {vocab_size - 1}, which are the model's vocabulary"


def _check_amount(request: CompletionRequest, *, max_model_len: int) -> None:
    """Bound what all completions may come to; none of them is longer than the context."""
    each = min(request.max_tokens, max_model_len)
    if request.num_choices * each > request.max_total_tokens:
        raise InvalidRequest.refusing(
            request.max_tokens_name,
            must=f"be such that completions times it are at most {request.max_total_tokens}",
            found=f"{request.num_choices} × {each}",
        )
