"""The decoder of llama-like models as one loop: a step in, logits out, nothing set aside for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from serve_app.engine.decoder.layer import Layer, Rotation
from serve_app.engine.decoder.norm import Change, Norm
from serve_app.engine.decoder.step import Step
from serve_app.engine.lora.plan import Mix

Adapt: TypeAlias = Callable[[Sequence[Mix]], None]
"""Says what each row is adapted with from now on."""
Rotary: TypeAlias = Callable[[Tensor, Tensor, str], Rotation]
"""From the stream (for its type), positions [tokens] and a kind of layer."""


class DecoderLoop:
    """Computes steps as the model itself would, which it takes its modules from and is compared with when loaded.

    Rows whose logits nobody wants end behind the last layer's attention.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        embed: Callable[[Tensor], Tensor],
        rotary: Rotary,
        norm: Norm,
        head: Callable[[Tensor], Tensor],
        embedding_factor: float = 1.0,
        logits_divisor: float = 1.0,
        softcap: float | None = None,
        adapt: Adapt | None = None,
    ) -> None:
        """adapt: of a model that has adapters; a step's rows are told before it is computed"""
        self._layers = layers
        self._adapt = adapt
        self._kinds = sorted({layer.attention.rope for layer in layers if layer.attention.rope is not None})
        self._embed = embed
        self._rotary = rotary
        self._norm = norm
        self._head = head
        self._embedding_factor = embedding_factor
        self._logits_divisor = logits_divisor
        self._softcap = softcap

    def __call__(self, step: Step) -> Tensor:
        """The wanted logits, [rows, vocab]. Writes keys and values at the step's places."""
        return self._logits(self.stream(step))

    def stream(self, step: Step) -> Tensor:
        """What the last layer gives of the rows whose logits are wanted, [rows, hidden]; writes keys and values."""
        x = self._embedded(step)
        rotations = {kind: self._rotary(x, step.positions, kind) for kind in self._kinds}
        if self._adapt is not None and any(step.mixes):
            self._adapt(step.mixes)
        change: Change | None = None
        for number, layer in enumerate(self._layers):
            attended = self._attended(number, layer, step, layer.begin(x, change), rotations)
            if number < len(self._layers) - 1:
                change = layer.finish(x, attended)
        return self._finish(step, x, attended)

    def _finish(self, step: Step, x: Tensor, attended: Tensor) -> Tensor:
        """What follows the last layer's attention, of the rows whose logits are wanted."""
        x, attended = x.index_select(0, step.logit_rows), attended.index_select(0, step.logit_rows)
        if self._adapt is not None and any(step.mixes):
            self._adapt(step.logit_mixes)
        self._layers[-1].finish(x, attended).add_to(x)
        return x

    def _embedded(self, step: Step) -> Tensor:
        """[tokens, hidden], a tensor of its own."""
        x = self._embed(step.token_ids)
        if step.embeddings is not None and step.illustrated is not None:
            x = x.index_copy(0, step.illustrated, step.embeddings)
        return x if self._embedding_factor == 1.0 else x * self._embedding_factor

    def _attended(
        self, number: int, layer: Layer, step: Step, normed: Tensor, rotations: dict[str, Rotation]
    ) -> Tensor:
        attention = layer.attention
        rotation = None if attention.rope is None else rotations[attention.rope]
        query, key, value = attention.project(normed, rotation)
        return step.attention.run(number, query, key, value, scoring=attention.scoring).flatten(1)

    def _logits(self, x: Tensor) -> Tensor:
        logits = self._head(self._norm(x))
        if self._logits_divisor != 1.0:
            logits = logits / self._logits_divisor
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits
