"""The bodies of responses: completions, usage, errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.api.logprobs import LegacyLogprobs
from serve_app.core.delta import FinishReason, Usage
from serve_app.core.errors import ServeError

OBJECT = "text_completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What is the same in every chunk of a response.

    created: Unix seconds
    model:   the string that the client sent
    """

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice of a body, or what one chunk adds to it; without a finish reason while it goes on."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None

    def body(self) -> dict[str, object]:
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": None if self.logprobs is None else self.logprobs.body(),
            "finish_reason": None if self.finish_reason is None else self.finish_reason.value,
            "matched_stop": self.matched_stop,
        }


def completion_body(head: ResponseHead, choices: Sequence[Choice], *, usage: Usage) -> dict[str, object]:
    return {
        **_head_body(head),
        "choices": [choice.body() for choice in choices],
        "usage": usage_body(usage),
    }


def chunk_body(
    head: ResponseHead, choices: Sequence[Choice], *, usage: dict[str, object] | None = None
) -> dict[str, object]:
    """One chunk of a stream; `usage` is absent from most."""
    body = {**_head_body(head), "choices": [choice.body() for choice in choices]}
    return body if usage is None else {**body, "usage": usage}


def usage_body(usage: Usage) -> dict[str, object]:
    return {
        **token_counts(usage.prompt_tokens, usage.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error_body(error: ServeError) -> dict[str, object]:
    """The error envelope: OpenAI's four keys, a code for machines, and the error's facts."""
    return {
        "error": {
            **error.facts,
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.status,
            "error_code": error.code,
        }
    }


def _head_body(head: ResponseHead) -> dict[str, object]:
    return {"id": head.id, "object": OBJECT, "created": head.created, "model": head.model}
