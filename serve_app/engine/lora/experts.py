"""Modules that are no linear and whose parameters adapters change: experts, and the routers that choose among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from serve_app.engine.lora.banked import Step
from serve_app.engine.lora.plan import Mix
from serve_app.engine.lora.shelf import Shelf


class BankedModule(nn.Module):
    """A module and the shelves with the changes to its parameters; in all else it is the module."""

    def __init__(self, base: nn.Module, name: str, *, shelves: Mapping[int, Shelf], step: Step) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self._shelves = shelves
        self._step = step

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def _groups(self, num_rows: int) -> Sequence[tuple[Mix, Tensor]]:
        """The adapted rows of the step, by the mix that they have."""
        plan = self._step.plan
        if plan is None:
            return ()
        if num_rows != plan.num_tokens:
            raise RuntimeError(f"{self.name} was given {num_rows} rows in a step of {plan.num_tokens}")
        return self._step.groups

    def _factors(self, parameter: str, mix: Mix) -> Iterator[tuple[float, Tensor, Tensor]]:
        """What the adapters of a mix do to a parameter: how much of each, its `down` and its `up`."""
        for slot, factor in mix:
            resident = self._step.residents[slot]
            stack = self._shelves[resident.rank].stacks.get(f"{self.name}.{parameter}")
            if stack is not None:
                yield factor, stack.down[resident.place], stack.up[resident.place]


class BankedExperts(BankedModule):
    """Experts as `transformers.integrations.moe` calls them, whichever family they are of."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [tokens, hidden];  top_k_index, top_k_weights: [tokens, experts per token]"""
        groups = self._groups(len(hidden_states))
        if not groups:
            return self.base(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        result = torch.empty_like(hidden_states)
        is_plain = torch.ones(len(hidden_states), dtype=torch.bool, device=hidden_states.device)
        for mix, rows in groups:
            is_plain[rows] = False
            result[rows] = self._compute(hidden_states[rows], top_k_index[rows], top_k_weights[rows], mix)
        if is_plain.any():
            result[is_plain] = self.base(hidden_states[is_plain], top_k_index[is_plain], top_k_weights[is_plain])
        return result

    def _compute(self, x: Tensor, chosen: Tensor, weights: Tensor, mix: Mix) -> Tensor:
        base: Any = self.base
        result = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            if expert >= base.num_experts:  # of another process
                continue
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            if base.has_gate:
                inner = base._apply_gate(self._product(x[rows], "gate_up_proj", expert, mix))
            else:
                inner = base.act_fn(self._product(x[rows], "up_proj", expert, mix))
            outer = self._product(inner, "down_proj", expert, mix)
            if base.has_post_expert_norm:
                outer = base.post_expert_norm(outer)
            result.index_add_(0, rows, (outer * weights[rows, place, None]).to(result.dtype))
        return result

    def _product(self, x: Tensor, parameter: str, expert: int, mix: Mix) -> Tensor:
        """What one expert's matrix makes of rows with one mix of adapters, [rows, out]."""
        base: Any = self.base
        weight = getattr(base, parameter)[expert]
        bias = getattr(base, f"{parameter}_bias")[expert] if base.has_bias else None
        y = F.linear(x, weight.T if base.is_transposed else weight, bias)
        for factor, down, up in self._factors(parameter, mix):
            y = y + (x @ down[expert].T @ up[expert].T) * factor
        return y


class BankedRouter(BankedModule):
    """A module that makes of each token what follows from the token and from a matrix, which adapters change."""

    def __init__(self, base: nn.Module, name: str, parameter: str, *, shelves: Mapping[int, Shelf], step: Step) -> None:
        super().__init__(base, name, shelves=shelves, step=step)
        self._parameter = parameter

    def forward(self, hidden_states: Tensor, *biases: Any) -> Any:
        """hidden_states: [..., hidden];  biases: which some families hand over"""
        outputs: Any = self.base(hidden_states, *biases)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weight = getattr(self.base, self._parameter)
        for mix, rows in self._groups(len(x)):
            changed = weight
            for factor, down, up in self._factors(self._parameter, mix):
                changed = changed + (up @ down) * factor
            made: Any = functional_call(self.base, {self._parameter: changed}, (x[rows], *biases))
            pairs = zip(outputs, made, strict=True) if isinstance(outputs, tuple) else [(outputs, made)]
            for whole, part in pairs:
                whole.view(-1, whole.shape[-1])[rows] = part.reshape(-1, part.shape[-1])
        return outputs
