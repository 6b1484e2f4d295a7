"""Writes JSON, and server-sent events that hold it."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii

DONE = b"data: [DONE]\n\n"
SEPARATORS = (",", ":")


def event(payload: str, *, kind: str = "") -> bytes:
    """Return one event. The payload is a single line, as JSON is without indentation."""
    return (f"event: {kind}\ndata: {payload}\n\n" if kind else f"data: {payload}\n\n").encode()


def comment(text: str) -> bytes:
    """Return a line that clients skip; it keeps the connection open."""
    return f": {' '.join(text.split())}\n\n".encode()


def dump_text(text: str) -> bytes:
    """Return what `dump` returns, for a string."""
    return encode_basestring_ascii(text).encode()


def dump(value: object) -> str:
    """Return compact JSON in ASCII; a fragment goes in as it is."""
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


@dataclass(frozen=True, slots=True)
class Fragment:
    """A value as it stands in JSON; ASCII."""

    text: str
