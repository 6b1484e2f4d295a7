"""Requests as a notebook writes them: what is sent, and what an answer is read by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.lab.reading import Asked, prompts_of, shown_prompt
from serve_app.lab.wire import Route

Message = Mapping[str, Any]
MAX_PROMPTS = 256
"""Of one request, by the service's own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """body: what is sent;  dialect: that it is read in, None for the service's own"""

    route: Route
    body: Mapping[str, Any]
    asked: Asked
    dialect: str | None

    @property
    def can_stream(self) -> bool:
        """A ranking needs every candidate first."""
        return self.body.get("best_of") is None


def completion_requests(
    prompt: str | Sequence[Any], models: str | Sequence[str], dialect: str | None, parameters: Mapping[str, Any]
) -> list[Request]:
    """One request, or as many as the prompts need at 256 each."""
    prompts = prompts_of(prompt)
    parts = [prompts[at : at + MAX_PROMPTS] for at in range(0, len(prompts), MAX_PROMPTS)] or [prompts]
    return [_completion(part, prompt if len(parts) == 1 else list(part), models, dialect, parameters) for part in parts]


def chat_request(
    messages: str | Sequence[Message], model: str, dialect: str | None, parameters: Mapping[str, Any]
) -> Request:
    """A text is a user's only message."""
    chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    asked = Asked(
        prompts=(shown_prompt(chat[-1]) if chat else "",),
        models=(model,),
        num_samples=int(parameters.get("n") or 1),
        is_chat=True,
    )
    return Request(route="chat", body={**parameters, "model": model, "messages": chat}, asked=asked, dialect=dialect)


def is_chat(prompt: object) -> bool:
    """Whether it is a list of messages."""
    return isinstance(prompt, Sequence) and any(isinstance(each, Mapping) and "role" in each for each in prompt)


def _completion(
    prompts: tuple[Any, ...],
    sent: object,
    models: str | Sequence[str],
    dialect: str | None,
    parameters: Mapping[str, Any],
) -> Request:
    asked = Asked(
        prompts=tuple(shown_prompt(each) for each in prompts),
        models=(models,) if isinstance(models, str) else tuple(models),
        num_samples=int(parameters.get("n") or 1),
    )
    model = models if isinstance(models, str) else list(models)
    body = {**parameters, "model": model, "prompt": sent}
    return Request(route="completions", body=body, asked=asked, dialect=dialect)
