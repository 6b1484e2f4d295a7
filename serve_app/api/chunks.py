"""Writes the chunks of one stream: what never changes is rendered once, only the rest per chunk."""

from __future__ import annotations

import json

from serve_app.api.responses import OBJECT, Choice, ResponseHead, token_counts, usage_body
from serve_app.api.sse import event
from serve_app.core.delta import Usage

SEPARATORS = (",", ":")


class ChunkWriter:
    """Events of one response. Equal, byte for byte, to `event(json.dumps(chunk_body(…)))`."""

    def __init__(self, head: ResponseHead) -> None:
        self._prefix = (
            f'data: {{"id":{json.dumps(head.id)},"object":"{OBJECT}","created":{head.created},'
            f'"model":{json.dumps(head.model)},"choices":['
        )

    def choice(self, choice: Choice) -> bytes:
        return f"{self._prefix}{_choice(choice)}]}}\n\n".encode()

    def choice_with_usage(self, choice: Choice, *, prompt_tokens: int, completion_tokens: int) -> bytes:
        """A chunk of a stream with continuous usage: the tokens of its choice so far."""
        usage = dump(token_counts(prompt_tokens, completion_tokens))
        return f'{self._prefix}{_choice(choice)}],"usage":{usage}}}\n\n'.encode()

    def usage(self, usage: Usage) -> bytes:
        """The chunk before the end, without choices."""
        return f'{self._prefix}],"usage":{dump(usage_body(usage))}}}\n\n'.encode()


def error_event(body: dict[str, object]) -> bytes:
    """An error after the first byte; `body` is the same as without a stream."""
    return event(dump(body))


def dump(value: object) -> str:
    """Compact JSON in ASCII, which no text can break."""
    return json.dumps(value, separators=SEPARATORS, allow_nan=False)


def _choice(choice: Choice) -> str:
    logprobs = "null" if choice.logprobs is None else dump(choice.logprobs.body())
    reason = "null" if choice.finish_reason is None else f'"{choice.finish_reason.value}"'
    matched = "null" if choice.matched_stop is None else json.dumps(choice.matched_stop)
    return (
        f'{{"index":{choice.index},"text":{json.dumps(choice.text)},"logprobs":{logprobs},'
        f'"finish_reason":{reason},"matched_stop":{matched}}}'
    )
