"""What spans say: OpenTelemetry's attributes for generative AI and HTTP, and a few of our own.

None is a text that a client or a model wrote. A model's name is one that exists: what a client made up is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_app.api.chat import ChatRequest
from serve_app.api.completion import CompletionRequest
from serve_app.api.embeddings import EmbeddingRequest
from serve_app.core.tenants import LOCAL
from serve_app.observe.legs import Leg
from serve_app.router.run import Run
from serve_app.router.story import Story

Value = str | bool | int | float | Sequence[str]


def of_story(story: Story, status: int, route: str) -> dict[str, Value]:
    """Of the span of a whole request."""
    found: dict[str, Value] = {
        "gen_ai.operation.name": operation_of(story.request),
        "gen_ai.provider.name": "serve_app",
        "http.request.method": "POST",
        "http.route": route,
        "http.response.status_code": status,
        "serve_app.request_id": story.request_id,
    }
    if story.identity is not LOCAL:
        found["serve_app.tenant"] = story.identity.tenant.name
    if story.request is not None:
        found |= _of_request(story.request)
    if story.run is not None:
        found |= _of_run(story.run)
    if story.first_sent_at is not None:
        found["gen_ai.response.time_to_first_chunk"] = story.first_sent_at - story.started_at
    if story.error is not None:
        found["error.type"] = story.error.code
    return found


def of_leg(leg: Leg) -> Mapping[str, str | int]:
    """Of the span of one leg."""
    found: dict[str, str | int] = {}
    if leg.part is not None:
        found |= {"serve_app.prompt.index": leg.part, "serve_app.replica": leg.replica}
        found["serve_app.attempts"] = leg.num_attempts
    if leg.num_tokens is not None:
        found["serve_app.tokens"] = leg.num_tokens
    return found


def operation_of(request: CompletionRequest | None) -> str:
    """One of the names that the conventions have."""
    match request:
        case EmbeddingRequest():
            return "embeddings"
        case ChatRequest():
            return "chat"
        case _:
            return "text_completion"


def _of_request(request: CompletionRequest) -> Mapping[str, Value]:
    if isinstance(request, EmbeddingRequest):
        return {}
    sent: dict[str, Value | None] = {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.request.frequency_penalty": request.frequency_penalty,
        "gen_ai.request.presence_penalty": request.presence_penalty,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.request.stream": request.stream,
    }
    return {name: value for name, value in sent.items() if value is not None}


def _of_run(run: Run) -> Mapping[str, Value]:
    models = ",".join(model.name for model in run.tallies)
    usage = run.tally.usage
    return {
        "gen_ai.request.model": models,
        "gen_ai.response.model": models,
        "gen_ai.response.id": run.response_id,
        "gen_ai.response.finish_reasons": [reason.value for reason in run.tally.finish_reasons],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "serve_app.engine_seconds": run.tally.engine_ns / 1e9,
    }
