"""What a computation is to leave beside text, and what it left: hidden states, and the experts that were chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pooling = Literal["mean", "last", "first", "max", "mean_sqrt", "weighted_mean"]
"""Which vector is made of a prompt's hidden states: their mean; one of them; of each number the highest; their sum
divided by the root of how many they are; their mean, weighted by their places."""
HiddenStates = Literal["drawn", "all"] | Pooling
"""Of the positions that are computed, which is all but the last generated token: the last one; those that a token was
drawn from, or the prompt's last where none was; all of them; one vector of the prompt's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingForm:
    """How a model embeds a text, which is closed with the tokens that its tokenizer puts behind a text.

    normalizes:  the vector is divided by its length
    max_tokens:  of an input; None is as many as the context has
    lowers_case: of an input's letters
    reason:      why there are none; None where there are
    """

    pooling: Pooling = "mean"
    normalizes: bool = True
    max_tokens: int | None = None
    lowers_case: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordParams:
    """What is wanted of each completion of a request, with its end.

    hidden_states: of which positions; None is of none
    echoed:        where all are wanted, so many last tokens of the prompt; 0 is the whole prompt
    experts:       the experts that every position was sent to, at every layer
    name:          of the parameter that asked for it, as the client knows it, for refusals
    dimensions:    the one vector that is wanted is cut to so many numbers; None leaves it whole
    embedding:     the prompt is an input that is embedded so; None is a prompt like any other
    """

    hidden_states: HiddenStates | None = None
    echoed: int = 0
    experts: bool = False
    name: str = ""
    dimensions: int | None = None
    embedding: EmbeddingForm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What was wanted, of one sequence; little-endian and in C order.

    hidden_states: float32 [states, hidden], what the last layer and its norm gave; b"" where it was not asked for
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
