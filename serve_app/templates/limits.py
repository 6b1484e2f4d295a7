"""Bounds on what one rendering may cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """A template is a model's maker's to write and messages are a tenant's, so everything they cost is bounded.

    max_cpu_s:      processor time of one rendering, after which its process is ended by the kernel
    max_wall_s:     the same on the clock, where others have the processors
    courtesy_s:     after so long a rendering runs at lower priority than the engine
    max_bytes:      memory of one rendering beside the template
    max_chars:      of the text that comes out
    max_renderings: at once, of conversations of at most `short_chars`, and of longer ones
    short_chars:    characters of a conversation's JSON
    max_waiting:    conversations that are rendered or wait for it; more are refused
    """

    max_cpu_s: float = 1.0
    max_wall_s: float = 1.4
    courtesy_s: float = 0.2
    max_bytes: int = 512 << 20
    max_chars: int = 8_000_000
    max_renderings: tuple[int, int] = (3, 1)
    short_chars: int = 65_536
    max_waiting: int = 512


DEFAULT_LIMITS = TemplateLimits()
