"""What a computation left, as members of a choice, and vectors as they stand in a body."""

from __future__ import annotations

import base64
import sys
from array import array
from dataclasses import dataclass

from serve_app.api.fragments import Fragment
from serve_app.core.request import Recording

DIGITS = "%.9g"
"""So many tell every float32 apart from every other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRecording:
    """is_flat: of one state, which is a list of numbers; otherwise a list of such lists"""

    recording: Recording
    is_flat: bool = False

    def members(self) -> dict[str, object]:
        """What a choice has of it. To write a million numbers takes a quarter of a second: not on an event loop."""
        found = self.recording
        members: dict[str, object] = {}
        if found.num_states:
            rows = state_rows(found)
            members["hidden_states"] = Fragment(rows[0] if self.is_flat else f"[{','.join(rows)}]")
        if found.experts:
            members["sglext"] = {
                "routed_experts": experts_text(found),
                "routed_experts_shape": list(found.experts_shape),
            }
        return members


def state_rows(recording: Recording) -> list[str]:
    """Each state as a JSON list of numbers."""
    data = recording.hidden_states
    size = len(data) // recording.num_states
    return [numbers_text(data[first : first + size]) for first in range(0, len(data), size)]


def numbers_text(data: bytes) -> str:
    """Float32 as a JSON list; each is read as the same float32."""
    numbers = array("f")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return f"[{','.join([DIGITS] * len(numbers))}]" % tuple(numbers)


def experts_text(recording: Recording) -> str:
    """Base64 of the array."""
    return base64.b64encode(recording.experts).decode("ascii")
