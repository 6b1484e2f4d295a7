"""The bodies of responses: completions, their choices, usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from serve_app.api.logprobs import LegacyLogprobs
from serve_app.api.recordings import ShownRecording, experts_text
from serve_app.core.delta import FinishReason, Usage
from serve_app.core.request import Recording
from serve_app.core.tools import ToolCall

OBJECT = "text_completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What is the same in every chunk of a response.

    created: Unix seconds
    model:   the string that the client sent; of a list, all of them with commas between
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
    model: that answers, where several do
    tool_calls: that the whole text is, beside its end; a body leaves them out where it is none
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
    model: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    recording: ShownRecording | None = None

    @property
    def is_silent(self) -> bool:
        """Whether it shows nothing that a client waits for."""
        of_prompt = self.prompt_token_ids or self.prompt_logprobs
        shown = self.text or self.token_ids or self.logprobs or self.finish_reason or of_prompt
        return not shown and self.recording is None

    def without_recording(self) -> Choice:
        return self if self.recording is None else replace(self, recording=None)

    def with_text(self, text: str) -> Choice:
        return replace(self, text=text)

    def recording_alone(self) -> Choice:
        return Choice(index=self.index, text="", recording=self.recording, model=self.model)

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
        """The members that are there only where they were asked for, or where there is something to tell."""
        lists = {
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_token_ids,
            "prompt_logprobs": self.prompt_logprobs,
        }
        found: dict[str, object] = {} if self.model is None else {"model": self.model}
        if self.has_stop_reason:
            found["stop_reason"] = self.stop_reason
        found |= {name: list(each) for name, each in lists.items() if each is not None}
        if self.tool_calls:
            found["tool_calls"] = [call.body() for call in self.tool_calls]
        return found if self.recording is None else found | self.recording.members()


class Shown(Protocol):
    """A choice of any kind of response."""

    def body(self) -> dict[str, object]: ...


def completion_body(
    head: ResponseHead,
    choices: Sequence[Shown],
    *,
    usage: Usage,
    extras: Mapping[str, object] | None = None,
    kind: str = OBJECT,
) -> dict[str, object]:
    """A whole response. `extras` are the members that a client or its dialect asked for."""
    return {
        **_head_body(head, kind),
        "choices": [choice.body() for choice in choices],
        "usage": usage_body(usage),
        **(extras or {}),
    }


def usage_body(usage: Usage) -> dict[str, object]:
    """With what was cut of prompts only where something was, and with what was guessed where something was expected."""
    details = {"cached_tokens": usage.cached_tokens}
    if usage.truncated_tokens:
        details["truncated_tokens"] = usage.truncated_tokens
    counts = {**token_counts(usage.prompt_tokens, usage.completion_tokens), "prompt_tokens_details": details}
    if usage.predicted is not None:
        accepted, rejected = usage.predicted
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        }
    return counts


def token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def sglext_members(usage: Usage | None, recording: Recording | None) -> dict[str, object]:
    """SGLang's extension of a response, or nothing where nothing of it was asked for.

    usage:     where cached tokens are to be told; here they are all on the device
    recording: of the first choice, whose experts stand there
    """
    members: dict[str, object] = {}
    if recording is not None and recording.experts:
        members["routed_experts"] = experts_text(recording)
    if usage is not None:
        members["cached_tokens_details"] = {"device": usage.cached_tokens, "host": 0}
    return {"sglext": members} if members else {}


def _head_body(head: ResponseHead, kind: str) -> dict[str, object]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}
