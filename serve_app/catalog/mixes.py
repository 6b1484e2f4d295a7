"""Reads adapters as an address has them: a name, or a mix such as `a*0.7+b*0.3`."""

from __future__ import annotations

import re

from serve_app.core.names import MAX_SCALE

ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,96}")
"""Of adapters; `*` and `+` have their meaning in addresses."""
MIX_WORDS = f"name*scale+name*scale with scales from -{MAX_SCALE:g} to {MAX_SCALE:g}"
_SIGNS = re.compile(r"[*+]")
_SCALE = re.compile(r"-?([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})(e-[0-9]{1,3})?")

NamesAndScales = tuple[tuple[str, float], ...]


def is_mix(text: str) -> bool:
    """Whether it cannot be one adapter's name."""
    return _SIGNS.search(text) is not None


def read_mix(text: str) -> NamesAndScales | None:
    """The adapters with their scales, 1 where none is written; None where it is no mix at all."""
    parts = tuple(_part(part.strip()) for part in text.split("+"))
    found = tuple(part for part in parts if part is not None)
    return found if len(found) == len(parts) else None


def write_mix(parts: NamesAndScales) -> str:
    """What `read_mix` reads as these."""
    return "+".join(f"{name}*{scale!r}" for name, scale in parts)


def _part(text: str) -> tuple[str, float] | None:
    name, sign, written = (piece.strip() for piece in text.partition("*"))
    if not ADAPTER_NAME.fullmatch(name) or (sign and not _SCALE.fullmatch(written)):
        return None
    scale = float(written) if sign else 1.0
    return (name, scale) if abs(scale) <= MAX_SCALE else None
