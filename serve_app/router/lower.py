"""Turns what a client sent into one internal request per prompt."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from serve_app.api.completion import CompletionRequest
from serve_app.core.errors import InvalidRequest
from serve_app.core.names import ModelRef
from serve_app.core.request import GenerationRequest, LogprobParams, Prompt, SamplingParams, StopParams

SEED_BITS = 63

Resolve = Callable[[str, str | None], ModelRef]


def new_response_id() -> str:
    return f"cmpl-{secrets.token_hex(16)}"


def lower(
    request: CompletionRequest,
    response_id: str,
    *,
    resolve: Resolve,
    vocab_size_of: Callable[[ModelRef], int],
) -> tuple[GenerationRequest, ...]:
    """One request per prompt, in order, named `<response id>/<prompt index>`.

    resolve: (`model`, `lora_path`) to the model meant; asked once per distinct pair

    Raises what `resolve` raises, and InvalidRequest for a token id outside the vocabulary.
    """
    refs: dict[str | None, ModelRef] = {}
    for index, prompt in enumerate(request.prompts):
        lora_path = request.lora_path_of(index)
        if lora_path not in refs:
            refs[lora_path] = resolve(request.model, lora_path)
        _check_ids(prompt, index, request=request, vocab_size=vocab_size_of(refs[lora_path]))
    sampling = _sampling(request)
    stop = StopParams(max_tokens=None if request.max_tokens == -1 else request.max_tokens, strings=request.stop)
    logprobs = None
    if request.logprobs is not None:
        logprobs = LogprobParams(top=request.logprobs, prompt=request.echo)
    return tuple(
        GenerationRequest(
            request_id=f"{response_id}/{index}",
            model=refs[request.lora_path_of(index)],
            prompt=prompt,
            prompt_index=index,
            n=request.n,
            sampling=sampling,
            stop=stop,
            logprobs=logprobs,
            echo=request.echo,
        )
        for index, prompt in enumerate(request.prompts)
    )


def _sampling(request: CompletionRequest) -> SamplingParams:
    """A seed is drawn once where none was sent, so that every continuation can be computed again."""
    seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
    return SamplingParams(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        seed=seed & (2**SEED_BITS - 1),
    )


def _check_ids(prompt: Prompt, index: int, *, request: CompletionRequest, vocab_size: int) -> None:
    highest = max((max(part) for part in prompt.parts if isinstance(part, tuple)), default=-1)
    if highest >= vocab_size:
        path = "prompt" if len(request.prompts) == 1 else f"prompt[{index}]"
        raise InvalidRequest(
            f"`{path}` must hold token ids from 0 to {vocab_size - 1}; {highest} is out of vocabulary.", path
        )
