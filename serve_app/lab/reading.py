"""Reads bodies and streams of completions and chats into the choices that a notebook has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.lab.completion import Completion
from serve_app.lab.markup import Token, tokens_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request was about, which its answer does not repeat.

    prompts: as they are shown
    models:  one, or several that each answer every prompt
    """

    prompts: tuple[str, ...]
    models: tuple[str, ...]
    num_samples: int = 1
    is_chat: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * len(self.models) * self.num_samples

    def prompt_of(self, index: int) -> str:
        """By a choice's index, which is (model · prompts + prompt) · n + sample."""
        return self.prompts[index // self.num_samples % len(self.prompts)]

    def model_of(self, index: int) -> str:
        return self.models[index // (self.num_samples * len(self.prompts))]


@dataclass(slots=True, kw_only=True)
class Draft:
    """A choice while it is read."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, part: Mapping[str, Any]) -> str:
        """Take what a body or a chunk has of it; returns the text that it adds."""
        message = part.get("delta") or part.get("message") or {}
        text = part.get("text") or message.get("content") or ""
        self.text += text
        self.tokens += tokens_of(part.get("logprobs"))
        self.finish_reason = part.get("finish_reason") or self.finish_reason
        for at, call in enumerate(message.get("tool_calls") or part.get("tool_calls") or ()):
            self._add_call(call.get("index", at), call)
        return text

    def _add_call(self, index: int, call: Mapping[str, Any]) -> None:
        """The first piece of a call names it, those behind it bring its arguments."""
        function = call.get("function") or {}
        known = self.calls.setdefault(
            index, {"id": call.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
        )
        known["function"]["name"] += function.get("name") or ""
        known["function"]["arguments"] += function.get("arguments") or ""


@dataclass(slots=True, kw_only=True)
class Reading:
    """All choices of one answer while they are read."""

    asked: Asked
    drafts: dict[int, Draft] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)

    @property
    def num_finished(self) -> int:
        return sum(draft.finish_reason is not None for draft in self.drafts.values())

    def add(self, body: Mapping[str, Any]) -> str:
        """Take a body or a chunk; returns what it adds to the first choice."""
        shown = ""
        for part in body.get("choices") or ():
            added = self.drafts.setdefault(part["index"], Draft()).add(part)
            shown += added if part["index"] == 0 else ""
        if body.get("usage"):
            self.usage = counts(body["usage"])
        return shown

    def choices(self) -> tuple[Completion, ...]:
        """What was read so far, by index."""
        return tuple(
            Completion(
                index=index,
                prompt=self.asked.prompt_of(index),
                model=self.asked.model_of(index),
                text=draft.text,
                finish_reason=draft.finish_reason,
                tokens=tuple(draft.tokens),
                tool_calls=tuple(draft.calls[at] for at in sorted(draft.calls)),
                is_chat=self.asked.is_chat,
            )
            for index, draft in sorted(self.drafts.items())
        )


def counts(usage: Mapping[str, Any]) -> dict[str, int]:
    """Tokens of an answer, those found in the cache among them."""
    details = usage.get("prompt_tokens_details") or {}
    return {
        "prompt_tokens": int(usage.get("prompt_tokens") or 0),
        "cached_tokens": int(details.get("cached_tokens") or 0),
        "completion_tokens": int(usage.get("completion_tokens") or 0),
    }


def shown_prompt(prompt: object) -> str:
    """A prompt as a person reads it; token ids and mixed prompts as they were sent."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        return str(prompt.get("content") or "")
    return str(prompt)


def prompts_of(prompt: str | Sequence[Any]) -> tuple[Any, ...]:
    """A list with a token id at its top is one prompt, any other is a list of prompts."""
    if isinstance(prompt, str) or any(isinstance(each, int) for each in prompt):
        return (prompt,)
    return tuple(prompt)


def joined(parts: Iterable[tuple[Completion, ...]]) -> tuple[Completion, ...]:
    """Choices of several requests as if they were of one."""
    every = [each for part in parts for each in part]
    return tuple(replace(each, index=index) for index, each in enumerate(every))
