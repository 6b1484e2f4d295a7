"""Writes the chunks of one stream: what never changes is rendered once, only the rest per chunk."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping

from serve_app.api.fragments import Fragment
from serve_app.api.responses import OBJECT, Choice, ResponseHead
from serve_app.api.sse import event

SEPARATORS = (",", ":")


class ChunkWriter:
    """Events of one response. Equal, byte for byte, to what `event(dump(…))` makes of the same members."""

    def __init__(self, head: ResponseHead) -> None:
        self._prefix = (
            f'data: {{"id":{json.dumps(head.id)},"object":"{OBJECT}","created":{head.created},'
            f'"model":{json.dumps(head.model)},"choices":['
        )

    def choice(self, choice: Choice, extras: Mapping[str, object] | None = None) -> bytes:
        """What one choice gained; `extras` are further members of the chunk, such as `usage`."""
        return f"{self._prefix}{_choice(choice)}]{_members(extras)}}}\n\n".encode()

    def bare(self, extras: Mapping[str, object]) -> bytes:
        """A chunk without choices."""
        return f"{self._prefix}]{_members(extras)}}}\n\n".encode()


def error_event(body: dict[str, object]) -> bytes:
    """An error after the first byte."""
    return event(dump(body))


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


def _choice(choice: Choice) -> str:
    logprobs = "null" if choice.logprobs is None else dump(choice.logprobs.body())
    reason = "null" if choice.finish_reason is None else f'"{choice.finish_reason.value}"'
    matched = "null" if choice.matched_stop is None else json.dumps(choice.matched_stop)
    return (
        f'{{"index":{choice.index},"text":{json.dumps(choice.text)},"logprobs":{logprobs},'
        f'"finish_reason":{reason},"matched_stop":{matched}{_members(choice.optional())}}}'
    )


def _members(members: Mapping[str, object] | None) -> str:
    """Further members of an object that is not empty."""
    return "," + dump(members)[1:-1] if members else ""
