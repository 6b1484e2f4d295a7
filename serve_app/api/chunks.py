"""Writes the chunks of one stream: what never changes is rendered once, only the rest per chunk."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring_ascii
from typing import Generic, TypeVar

from serve_app.api.chat_responses import ChatChoice
from serve_app.api.fragments import Fragment
from serve_app.api.responses import OBJECT, Choice, ResponseHead
from serve_app.api.sse import event

Chosen = TypeVar("Chosen")
SEPARATORS = (",", ":")
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
        """What one choice gained; `extras` are further members of the chunk, such as `usage`."""
        return f"{self._prefix}{self._write(choice)}]{_members(extras)}}}\n\n".encode()

    def around(self, choice: Chosen, extras: Mapping[str, object] | None = None) -> tuple[bytes, bytes]:
        """What stands before and behind the text of such a choice; choice: its text is `TEXT_MARK`"""
        chunk = self.choice(choice, extras)
        at = chunk.index(TEXT_MARK_AS_JSON, len(self._prefix))  # the model in front may have any name
        return chunk[:at], chunk[at + len(TEXT_MARK_AS_JSON) :]

    def bare(self, extras: Mapping[str, object]) -> bytes:
        """A chunk without choices."""
        return f"{self._prefix}]{_members(extras)}}}\n\n".encode()


def error_event(body: dict[str, object]) -> bytes:
    """An error after the first byte."""
    return event(dump(body))


def dump_text(text: str) -> bytes:
    """As `dump`, of a string."""
    return encode_basestring_ascii(text).encode()


def dump(value: object) -> str:
    """Compact JSON in ASCII, which no text can break; a fragment stands where it is met, as it is."""
    fragments: list[str] = []
    mark = ""

    def hold_place(fragment: object) -> str:
        nonlocal mark
        if not isinstance(fragment, Fragment):
            raise TypeError(f"{type(fragment).__name__} is no JSON")
        mark = mark or secrets.token_hex(16)  # in nobody's text
        fragments.append(fragment.text)
        return f"{mark}{len(fragments) - 1}"

    text = json.dumps(value, separators=SEPARATORS, allow_nan=False, default=hold_place)
    return re.sub(f'"{mark}([0-9]+)"', lambda place: fragments[int(place[1])], text) if fragments else text


def written_choice(choice: Choice) -> str:
    """What a chunk adds to a choice of a completion."""
    logprobs = "null" if choice.logprobs is None else dump(choice.logprobs.body())
    reason = "null" if choice.finish_reason is None else f'"{choice.finish_reason.value}"'
    matched = "null" if choice.matched_stop is None else json.dumps(choice.matched_stop)
    return (
        f'{{"index":{choice.index},"text":{json.dumps(choice.text)},"logprobs":{logprobs},'
        f'"finish_reason":{reason},"matched_stop":{matched}{_members(choice.optional())}}}'
    )


def written_message(choice: ChatChoice) -> str:
    """What a chunk adds to a choice of a chat."""
    return dump(choice.chunk())


def _members(members: Mapping[str, object] | None) -> str:
    """Further members of an object that is not empty."""
    return "," + dump(members)[1:-1] if members else ""
