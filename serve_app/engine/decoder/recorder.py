"""Records hidden states and chosen experts during a forward, for sequences that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from serve_app.engine.decoder.record import expert_layers
from serve_app.engine.scheduler.sequence import Batch


class Recorder:
    """Hooks are on the model while a batch is computed of which somebody wants something, and never else."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._decoder: nn.Module = module.get_decoder()
        self.renew()

    def renew(self) -> None:
        """Look for experts anew, as adapters were wrapped around some."""
        self._experts = expert_layers(self._module)

    @contextmanager
    def watching(self, batch: Batch) -> Iterator[None]:
        """Within it the batch is computed; behind it, every record of the batch has what is its own."""
        if all(span.sequence.record is None for span in batch.spans):
            yield
            return
        records = [record for span in batch.spans if (record := span.sequence.record) is not None]
        states: list[Tensor] = []
        experts: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            if any(record.wants_states for record in records):
                hooks.callback(self._decoder.register_forward_hook(_noting_states(states)).remove)
            if any(record.wants_experts for record in records):
                for layer, part in self._experts.items():
                    hooks.callback(part.register_forward_pre_hook(_noting_experts(experts, layer)).remove)
            yield
        _hand_out(batch, states[0] if states else None, experts)


def _hand_out(batch: Batch, states: Tensor | None, experts: dict[int, Tensor]) -> None:
    """Give every span's rows to its record.

    states: [tokens, hidden];  experts: by layer, [tokens, experts per token]
    """
    first = 0
    for span in batch.spans:
        record, end = span.sequence.record, first + span.length
        if record is not None:
            record.take(
                span.start,
                states[first:end] if states is not None and record.wants_states else None,
                {layer: chosen[first:end] for layer, chosen in experts.items()} if record.wants_experts else {},
            )
        first += span.num_computed


def _noting_states(found: list[Tensor]) -> Callable[..., None]:
    def note(_: nn.Module, __: Any, output: Any) -> None:
        states = output.last_hidden_state if isinstance(output, ModelOutput) else output[0]
        found.append(states[0])

    return note


def _noting_experts(found: dict[int, Tensor], layer: int) -> Callable[..., None]:
    def note(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        found[layer] = arguments[1].reshape(-1, arguments[1].shape[-1])

    return note
