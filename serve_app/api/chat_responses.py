"""The bodies of chats' responses: messages, what a chunk adds to one, and log-probabilities in their shape."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from serve_app.api.logprobs import finite
from serve_app.api.recordings import ShownRecording
from serve_app.core.delta import FinishReason, TokenLogprob
from serve_app.core.tools import ToolCall, ToolCallDelta

CHAT_OBJECT, CHAT_CHUNK_OBJECT = "chat.completion", "chat.completion.chunk"
ASSISTANT = "assistant"
ESCAPED = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")
"""How a token is shown that is no whole characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    """One choice of a body, or what one chunk adds to it; without a finish reason while it goes on.

    role:     only where the choice begins
    model:    that answers, where several do
    has_stop_reason, stop_reason: as of `Choice`
    logprobs: None where they were not asked for
    token_ids, prompt_token_ids: None where they were not asked for; a body leaves them out then
    """

    index: int
    role: str | None = None
    model: str | None = None
    content: str = ""
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    has_stop_reason: bool = False
    stop_reason: str | int | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    recording: ShownRecording | None = None

    @property
    def is_silent(self) -> bool:
        """Whether it shows nothing that a client waits for."""
        shown = (self.role, self.content, self.reasoning, self.logprobs, self.finish_reason, self.token_ids)
        return not any((*shown, self.prompt_token_ids, self.tool_calls, self.recording))

    def without_recording(self) -> ChatChoice:
        return self if self.recording is None else replace(self, recording=None)

    def with_text(self, text: str) -> ChatChoice:
        return replace(self, content=text)

    def recording_alone(self) -> ChatChoice:
        return ChatChoice(index=self.index, recording=self.recording, model=self.model)

    def body(self) -> dict[str, object]:
        """As a choice of a whole response."""
        message: dict[str, object] = {"role": ASSISTANT, "content": self.content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.body() for call in joined_calls(self.tool_calls)]
        logprobs = None if self.logprobs is None else chat_logprobs(self.logprobs)
        return {"index": self.index, "message": message, "logprobs": logprobs, **self._besides()}

    def chunk(self) -> dict[str, object]:
        """As what a chunk adds to it."""
        delta: dict[str, object] = {} if self.role is None else {"role": self.role, "content": ""}
        if self.reasoning:
            delta["reasoning_content"] = self.reasoning
        if self.content:
            delta["content"] = self.content
        if self.tool_calls:
            delta["tool_calls"] = [call.body() for call in one_per_call(self.tool_calls)]
        logprobs = chat_logprobs(self.logprobs) if self.logprobs else None
        return {"index": self.index, "delta": delta, "logprobs": logprobs, **self._besides()}

    def _besides(self) -> dict[str, object]:
        asked = {"token_ids": self.token_ids, "prompt_token_ids": self.prompt_token_ids}
        return {
            **({} if self.model is None else {"model": self.model}),
            "finish_reason": None if self.finish_reason is None else self.finish_reason.value,
            "matched_stop": self.matched_stop,
            **({"stop_reason": self.stop_reason} if self.has_stop_reason else {}),
            **{name: list(ids) for name, ids in asked.items() if ids is not None},
            **({} if self.recording is None else self.recording.members()),
        }


def joined_calls(deltas: Sequence[ToolCallDelta]) -> list[ToolCall]:
    """The calls that these deltas make, in their order."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(ToolCall(id=delta.id or "", name=delta.name, arguments=delta.arguments))
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + delta.arguments)
    return calls


def one_per_call(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """The same with one delta for each call: clients take the first that they see of a list for all of its calls."""
    merged: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        first = merged.setdefault(delta.index, delta)
        if first is not delta:
            merged[delta.index] = replace(first, arguments=first.arguments + delta.arguments)
    return list(merged.values())


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, object]:
    """One object per token, with its bytes and with the likeliest at its place."""
    content = [
        {
            **_scored(entry.text, entry.logprob),
            "top_logprobs": [_scored(top.text, top.logprob) for top in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _scored(text: str, logprob: float | None) -> dict[str, object]:
    return {"token": text, "logprob": finite(logprob or 0.0), "bytes": _bytes_of(text)}


def _bytes_of(text: str) -> list[int]:
    escaped = ESCAPED.fullmatch(text)
    return list(text.encode()) if escaped is None else [int(byte, 16) for byte in escaped[1].split("\\x")[1:]]
