"""What was recorded of the computation of one sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What was wanted, of one sequence; little-endian and in C order.

    hidden_states: float32 [states, hidden], what the last layer and its norm gave; of a classification head its scores,
                   [1, labels]; b"" where it was not asked for
    num_states:    how many of them
    experts:       int32 [positions, layers, experts per token], in the order in which they were chosen; -1 all along a
                   layer without experts; b"" where it was not asked for, or the model has none
    experts_shape: these three
    """

    hidden_states: bytes = b""
    num_states: int = 0
    experts: bytes = b""
    experts_shape: tuple[int, int, int] = (0, 0, 0)

    @property
    def num_bytes(self) -> int:
        return len(self.hidden_states) + len(self.experts)
