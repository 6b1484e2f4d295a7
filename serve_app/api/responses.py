"""Responses of completions and chats: choices, usage, timings and headers, whole or as the chunks of a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar
from urllib.parse import quote

from serve_app.api.completion import CompletionRequest
from serve_app.api.logprobs import LegacyLogprobs, ShownRecording, experts_text, finite
from serve_app.api.sse import dump
from serve_app.core.delta import FinishReason, Recording, TokenLogprob, Usage
from serve_app.core.names import ModelRef
from serve_app.core.tools import ToolCall, ToolCallDelta, joined_calls, one_per_call

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
class ChoicePart:
    """What one chunk adds to a choice of any kind, or the whole choice; without a finish reason while it goes on.

    model:           the model that answers, where several do
    has_stop_reason: whether it says in vLLM's terms, too, what ended it
    stop_reason:     the stop string or the stop token; None where the model's own end did, or length
    token_ids, prompt_token_ids: None where they were not asked for; a body leaves them out then
    """

    index: int
    model: str | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    has_stop_reason: bool = False
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    recording: ShownRecording | None = None

    def without_recording(self) -> Self:
        return self if self.recording is None else replace(self, recording=None)

    def recording_alone(self) -> Self:
        return type(self)(index=self.index, recording=self.recording, model=self.model)

    def joined_ids(self, parts: Sequence[ChoicePart]) -> Self:
        """Return the last part with the token ids of all."""
        ids = None if self.token_ids is None else tuple(each for part in parts for each in part.token_ids or ())
        return replace(self, token_ids=ids, prompt_token_ids=parts[0].prompt_token_ids)

    def end(self) -> dict[str, object]:
        """Return what ended the choice."""
        reason = None if self.finish_reason is None else self.finish_reason.value
        return {"finish_reason": reason, "matched_stop": self.matched_stop}

    def extras(self, lists: Mapping[str, Sequence[object] | None] | None = None) -> dict[str, object]:
        """Return the members that are there only where they were asked for, or where there is something to tell.

        lists: further ones; None where they were not asked for
        """
        lists = {"token_ids": self.token_ids, "prompt_token_ids": self.prompt_token_ids, **(lists or {})}
        return {
            **({} if self.model is None else {"model": self.model}),
            **({"stop_reason": self.stop_reason} if self.has_stop_reason else {}),
            **{name: list(each) for name, each in lists.items() if each is not None},
            **({} if self.recording is None else self.recording.members()),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(ChoicePart):
    """A choice of a completion, or a part of one.

    logprobs, prompt_logprobs: None where they were not asked for
    tool_calls: that the whole text is, beside its end; a body leaves them out where it is none
    """

    text: str = ""
    logprobs: LegacyLogprobs | None = None
    prompt_logprobs: list[dict[str, object] | None] | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def is_silent(self) -> bool:
        """Whether it shows nothing that a client waits for."""
        of_prompt = self.prompt_token_ids or self.prompt_logprobs
        return not (self.text or self.token_ids or self.logprobs or self.finish_reason or of_prompt or self.recording)

    def with_text(self, text: str) -> Choice:
        return replace(self, text=text)

    def joined(self, parts: Sequence[Choice]) -> Choice:
        """Return the whole choice of these parts, of which this is the last."""
        logprobs = None if self.logprobs is None else LegacyLogprobs()
        if logprobs is not None:
            for part in parts:
                logprobs.append(part.logprobs or LegacyLogprobs())
        text, of_prompt = "".join(part.text for part in parts), parts[0].prompt_logprobs
        return replace(self.joined_ids(parts), text=text, logprobs=logprobs, prompt_logprobs=of_prompt)

    def body(self) -> dict[str, object]:
        logprobs = None if self.logprobs is None else self.logprobs.body()
        return {"index": self.index, "text": self.text, "logprobs": logprobs, **self.end(), **self.optional()}

    def optional(self) -> dict[str, object]:
        """Return the members of a body that may be absent."""
        calls = [call.body() for call in self.tool_calls] or None
        return self.extras({"prompt_logprobs": self.prompt_logprobs, "tool_calls": calls})


def completion_body(
    head: ResponseHead,
    choices: Sequence[Choice] | Sequence[ChatChoice],
    *,
    usage: Usage,
    extras: Mapping[str, object] | None = None,
    kind: str = OBJECT,
) -> dict[str, object]:
    """Return a whole response. `extras` are members that a client or its dialect asked for."""
    return {
        **{"id": head.id, "object": kind, "created": head.created, "model": head.model},
        "choices": [choice.body() for choice in choices],
        "usage": usage_body(usage),
        **(extras or {}),
    }


def usage_body(usage: Usage) -> dict[str, object]:
    """Return the counts of tokens; cut and predicted tokens only if there are any."""
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
    """Return SGLang's extension of a response, or nothing if nothing of it was asked for.

    usage:     where cached tokens are to be told; here they are all on the device
    recording: of the first choice, whose experts stand there
    """
    members: dict[str, object] = {}
    if recording is not None and recording.experts:
        members["routed_experts"] = experts_text(recording)
    if usage is not None:
        members["cached_tokens_details"] = {"device": usage.cached_tokens, "host": 0}
    return {"sglext": members} if members else {}


CHAT_OBJECT, CHAT_CHUNK_OBJECT = "chat.completion", "chat.completion.chunk"
ASSISTANT = "assistant"
ESCAPED = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")
"""How a token is shown that is no whole characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice(ChoicePart):
    """A message, or a part of one.

    role:     only where the choice begins
    logprobs: None where they were not asked for
    """

    role: str | None = None
    content: str = ""
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @property
    def is_silent(self) -> bool:
        """Whether it shows nothing that a client waits for."""
        shown = (self.role, self.content, self.reasoning, self.logprobs, self.finish_reason, self.token_ids)
        return not any((*shown, self.prompt_token_ids, self.tool_calls, self.recording))

    def with_text(self, text: str) -> ChatChoice:
        return replace(self, content=text)

    def joined(self, parts: Sequence[ChatChoice]) -> ChatChoice:
        """Return the whole message of these parts, of which this is the last."""
        return replace(
            self.joined_ids(parts),
            content="".join(part.content for part in parts),
            reasoning="".join(part.reasoning for part in parts),
            tool_calls=tuple(call for part in parts for call in part.tool_calls),
            logprobs=None if self.logprobs is None else tuple(each for part in parts for each in part.logprobs or ()),
        )

    def body(self) -> dict[str, object]:
        """Return the choice as a whole response has it."""
        message: dict[str, object] = {"role": ASSISTANT, "content": self.content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.body() for call in joined_calls(self.tool_calls)]
        logprobs = None if self.logprobs is None else chat_logprobs(self.logprobs)
        return {"index": self.index, "message": message, "logprobs": logprobs, **self.end(), **self.extras()}

    def chunk(self) -> dict[str, object]:
        """Return what a chunk adds to the choice."""
        delta: dict[str, object] = {} if self.role is None else {"role": self.role, "content": ""}
        if self.reasoning:
            delta["reasoning_content"] = self.reasoning
        if self.content:
            delta["content"] = self.content
        if self.tool_calls:
            # clients take the first delta of a list for the whole call
            delta["tool_calls"] = [call.body() for call in one_per_call(self.tool_calls)]
        logprobs = chat_logprobs(self.logprobs) if self.logprobs else None
        return {"index": self.index, "delta": delta, "logprobs": logprobs, **self.end(), **self.extras()}


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, object]:
    """Return one object per token, with its bytes and the likeliest tokens at its place."""
    content = [
        {**_scored(entry.text, entry.logprob), "top_logprobs": [_scored(top.text, top.logprob) for top in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _scored(text: str, logprob: float | None) -> dict[str, object]:
    return {"token": text, "logprob": finite(logprob or 0.0), "bytes": _bytes_of(text)}


def _bytes_of(text: str) -> list[int]:
    escaped = ESCAPED.fullmatch(text)
    return list(text.encode()) if escaped is None else [int(byte, 16) for byte in escaped[1].split("\\x")[1:]]


Chosen = TypeVar("Chosen")
TEXT_MARK = "\0text\0"
"""Stands for a text in a choice; nothing before it there is written so."""
TEXT_MARK_AS_JSON = json.dumps(TEXT_MARK).encode()


class ChunkWriter(Generic[Chosen]):
    """Events of one response. Equal, byte for byte, to what `event(dump(…))` makes of the same members.

    write: a choice as JSON;  kind: the chunks' `object`
    """

    def __init__(self, head: ResponseHead, write: Callable[[Chosen], str], *, kind: str = OBJECT) -> None:
        self._write = write
        self._prefix = (
            f'data: {{"id":{json.dumps(head.id)},"object":"{kind}","created":{head.created},'
            f'"model":{json.dumps(head.model)},"choices":['
        )

    def choice(self, choice: Chosen, extras: Mapping[str, object] | None = None) -> bytes:
        """Return the chunk of what one choice gained; `extras` are further members, such as `usage`."""
        return f"{self._prefix}{self._write(choice)}]{_members(extras)}}}\n\n".encode()

    def around(self, choice: Chosen, extras: Mapping[str, object] | None = None) -> tuple[bytes, bytes]:
        """Return what stands before and after the text of a choice whose text is `TEXT_MARK`."""
        chunk = self.choice(choice, extras)
        at = chunk.index(TEXT_MARK_AS_JSON, len(self._prefix))  # the model in front may have any name
        return chunk[:at], chunk[at + len(TEXT_MARK_AS_JSON) :]

    def bare(self, extras: Mapping[str, object]) -> bytes:
        """Return a chunk without choices."""
        return f"{self._prefix}]{_members(extras)}}}\n\n".encode()


def written_choice(choice: Choice) -> str:
    """Return what a chunk adds to a choice of a completion."""
    logprobs = dump(choice.logprobs.body()) if choice.logprobs else "null"
    reason = "null" if choice.finish_reason is None else f'"{choice.finish_reason.value}"'
    matched = "null" if choice.matched_stop is None else json.dumps(choice.matched_stop)
    return (
        f'{{"index":{choice.index},"text":{json.dumps(choice.text)},"logprobs":{logprobs},'
        f'"finish_reason":{reason},"matched_stop":{matched}{_members(choice.optional())}}}'
    )


def written_message(choice: ChatChoice) -> str:
    """Return what a chunk adds to a choice of a chat."""
    return dump(choice.chunk())


def _members(members: Mapping[str, object] | None) -> str:
    """Return further members of an object that is not empty."""
    return "," + dump(members)[1:-1] if members else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """prompt_s: until the first token was there;  predicted_s: from then to the last

    num_prompt_tokens: those computed, without those that were cached
    """

    num_cached_tokens: int
    num_prompt_tokens: int
    num_predicted_tokens: int
    prompt_s: float
    predicted_s: float

    def body(self) -> dict[str, object]:
        return {
            "cache_n": self.num_cached_tokens,
            "prompt_n": self.num_prompt_tokens,
            **_phase("prompt", self.num_prompt_tokens, self.prompt_s),
            "predicted_n": self.num_predicted_tokens,
            **_phase("predicted", self.num_predicted_tokens, self.predicted_s),
        }


def _phase(name: str, num_tokens: int, seconds: float) -> dict[str, object]:
    """Return milliseconds in all and per token, and the rate; 0 if there was nothing to divide by."""
    return {
        f"{name}_ms": round(1000 * seconds, 3),
        f"{name}_per_token_ms": round(1000 * seconds / num_tokens, 3) if num_tokens else 0.0,
        f"{name}_per_second": round(num_tokens / seconds, 3) if seconds else 0.0,
    }


IGNORED = "X-Ignored-Parameters"
RESUMABLE = "X-Resumable"
SEED = "X-Seed"
SERVED = "X-Served-Model"
SUFFIX_MODE = "X-Suffix-Mode"
TOOL_PROMPT = "X-Tool-Prompt"
TRUNCATED = "X-Truncated-Prompt-Tokens"
UNENFORCED = "X-Unenforced-Formats"
MAX_NAME_CHARS = 64
MAX_NAMES_CHARS = 1000
MAX_ADDRESS_CHARS = 1500
"""Of one in a header; a mix of eight adapters has about as many."""


def response_headers(
    request: CompletionRequest,
    usage: Usage | None = None,
    models: Iterable[ModelRef] = (),
    *,
    is_kept: bool | None = None,
) -> list[tuple[bytes, bytes]]:
    """Return the headers that are known by now; `usage` is None before anything was computed.

    models: that answer, as far as they are known;  is_kept: that its client can fetch it anew
    """
    headers = []
    if is_kept is not None:
        headers.append((RESUMABLE, str(is_kept).lower()))
    if addresses := tuple(dict.fromkeys(each.pinned for each in models)):
        headers.append((SERVED, listed_names(addresses, max_name_chars=MAX_ADDRESS_CHARS, safe=":/@*+")))
    if request.ignored_parameters:
        headers.append((IGNORED, ignored_names(request.ignored_parameters)))
    if request.seed is not None:
        headers.append((SEED, str(request.seed)))
    if request.suffix_mode is not None and (request.suffix or request.gap is not None):
        headers.append((SUFFIX_MODE, request.suffix_mode.value))
    if request.has_default_tool_prompt:
        headers.append((TOOL_PROMPT, "default"))
    if usage is not None and usage.truncated_tokens:
        headers.append((TRUNCATED, str(usage.truncated_tokens)))
    if usage is not None and usage.unenforced_formats:
        headers.append((UNENFORCED, ignored_names(usage.unenforced_formats)))
    return [(name.lower().encode(), value.encode()) for name, value in headers]


def ignored_names(names: tuple[str, ...]) -> str:
    return listed_names(names, max_name_chars=MAX_NAME_CHARS, safe="[]")


def listed_names(names: tuple[str, ...], *, max_name_chars: int, safe: str) -> str:
    """Return the names in ASCII, percent-encoded and shortened, and `+n` for those beyond the limit."""
    shown: list[str] = []
    num_chars = 0
    for name in names:
        quoted = quote(name[:max_name_chars], safe=safe, errors="replace")[: 2 * max_name_chars]
        num_chars += len(quoted) + 2
        if num_chars > MAX_NAMES_CHARS and shown:
            return ", ".join([*shown, f"+{len(names) - len(shown)}"])
        shown.append(quoted)
    return ", ".join(shown)
