"""The bodies of responses: completions, their choices, usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.api.logprobs import LegacyLogprobs
from serve_app.core.delta import FinishReason, Usage

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
    """One choice of a body, or what one chunk adds to it; without a finish reason while it goes on.

    token_ids, prompt_token_ids, prompt_logprobs: None where they were not asked for; a body leaves them out then
    has_stop_reason: whether it says in vLLM's terms, too, what ended it
    stop_reason:     the stop string or the stop token; None where the model's own end did, or length
    """

    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: list[dict[str, object] | None] | None = None
    has_stop_reason: bool = False
    stop_reason: str | int | None = None

    @property
    def is_silent(self) -> bool:
        """Whether it shows nothing that a client waits for."""
        of_prompt = self.prompt_token_ids or self.prompt_logprobs
        return not (self.text or self.token_ids or self.logprobs or self.finish_reason or of_prompt)

    def body(self) -> dict[str, object]:
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": None if self.logprobs is None else self.logprobs.body(),
            "finish_reason": None if self.finish_reason is None else self.finish_reason.value,
            "matched_stop": self.matched_stop,
            **self.optional(),
        }

    def optional(self) -> dict[str, object]:
        """The members that are there only where they were asked for."""
        lists = {
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_token_ids,
            "prompt_logprobs": self.prompt_logprobs,
        }
        reason = {"stop_reason": self.stop_reason} if self.has_stop_reason else {}
        return reason | {name: list(each) for name, each in lists.items() if each is not None}


def completion_body(
    head: ResponseHead, choices: Sequence[Choice], *, usage: Usage, extras: Mapping[str, object] | None = None
) -> dict[str, object]:
    """A whole response. `extras` are the members that a client or its dialect asked for."""
    return {
        **_head_body(head),
        "choices": [choice.body() for choice in choices],
        "usage": usage_body(usage),
        **(extras or {}),
    }


def usage_body(usage: Usage) -> dict[str, object]:
    """With what was cut of prompts only where something was."""
    details = {"cached_tokens": usage.cached_tokens}
    if usage.truncated_tokens:
        details["truncated_tokens"] = usage.truncated_tokens
    return {**token_counts(usage.prompt_tokens, usage.completion_tokens), "prompt_tokens_details": details}


def token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def sglext_body(usage: Usage) -> dict[str, object]:
    """SGLang's extension: where cached tokens came from. Here they are all on the device."""
    return {"cached_tokens_details": {"device": usage.cached_tokens, "host": 0}}


def _head_body(head: ResponseHead) -> dict[str, object]:
    return {"id": head.id, "object": OBJECT, "created": head.created, "model": head.model}
