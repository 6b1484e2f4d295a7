"""What a request may come to at most, before anything of it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serve_app.core.cards import ModelCard
from serve_app.core.ledger import Prices
from serve_app.core.names import ModelRef
from serve_app.core.request import GenerationRequest
from serve_app.core.tenants import Amount

TOOL_PROMPT_ROOM = " " * 1000
"""As long as the default text about tools, at least."""
NUM_SPECIAL = 8
"""Tokens that a tokenizer may set before and behind a prompt."""


def worst_case(
    requests: Sequence[GenerationRequest], *, card_of: Callable[[ModelRef], ModelCard], prices: Prices
) -> tuple[Amount, list[tuple[int, int]]]:
    """One request of a client, and of each of its parts the tokens of the prompt and of all completions. No text has
    more tokens than bytes, and none is longer than the model's context. Of a chat that is what was sent, names and
    quotes of its JSON included, and the template; a picture may be any length.
    """
    tokens = cost = 0
    parts = []
    for request in requests:
        card = card_of(request.model)
        context = card.max_model_len
        prompt = context if _has_images(request) else min(context, _num_bytes(request, card) + NUM_SPECIAL)
        longest = context if request.stop.max_tokens is None else min(context, request.stop.max_tokens)
        completion = request.n * longest
        tokens += prompt + completion
        parts.append((prompt, completion))
        price = prices.of(request.model.base, request.model.adapter)
        cost += price.cost(prompt_tokens=prompt, cached_tokens=0, completion_tokens=completion)
    return Amount(requests=1, tokens=tokens, cost=cost), parts


def _has_images(request: GenerationRequest) -> bool:
    return bool(request.prompt.images or (request.conversation is not None and request.conversation.images))


def _num_bytes(request: GenerationRequest, card: ModelCard) -> int:
    texts = [*request.texts]
    if request.conversation is not None:
        texts += [request.conversation.source, card.chat_template, card.tool_template, TOOL_PROMPT_ROOM]
    return request.prompt.num_ids + sum(
        [len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts]
    )
