"""One delta with its place in the response."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.delta import Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A delta with its place in the response.

    index: of the choice, part times `n` plus sample
    part:  of the client's request, model index times prompts plus prompt index
    completion_tokens: of the choice so far, this delta included
    """

    index: int
    part: int
    delta: Delta
    completion_tokens: int = 0
