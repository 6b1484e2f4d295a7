"""Server-sent events: the lines of a stream."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"


def event(payload: str, *, kind: str = "") -> bytes:
    """One event. The payload is a single line, as JSON is when written without indentation."""
    return (f"event: {kind}\ndata: {payload}\n\n" if kind else f"data: {payload}\n\n").encode()


def comment(text: str) -> bytes:
    """A line that clients skip; it keeps the connection open."""
    return f": {' '.join(text.split())}\n\n".encode()
