"""What a piece of a text adds: content, and deltas of calls."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from serve_app.core.tools import ToolCallDelta


def new_call_id() -> str:
    """Nine letters and digits, which the templates of Mistral insist on."""
    return secrets.token_hex(8)[:9]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What some text has added."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


@dataclass(slots=True)
class Gains:
    """What one feed has added so far."""

    content: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)

    def parsed(self) -> Parsed:
        return Parsed(content="".join(self.content), calls=tuple(self.calls))
