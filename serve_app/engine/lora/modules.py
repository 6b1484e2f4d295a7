"""Modules that change each row by the row's own adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from serve_app.engine.decoder.transformers_private import apply_gate
from serve_app.engine.lora.buckets import Shelf, Stack
from serve_app.engine.lora.plan import Gains, Mix, Plan, Resident
from serve_app.kernels.forms import AdaptedLinear, AdapterKernels, AdapterTiles, Adding, PlainKernels


class Step:
    """What all modules of a bank are told of the step that is computed.

    plan:    None is a step without adapters
    tiles:   its rows as kernels read them
    kernels: which compute the changes
    groups:  the adapted rows by their mix, for modules that are no linear
    residents: what is in each slot
    """

    def __init__(self) -> None:
        self.kernels: AdapterKernels = PlainKernels()
        self.plan: Plan | None = None
        self.tiles: tuple[AdapterTiles, ...] = ()
        self.groups: Sequence[tuple[Mix, Tensor]] = ()
        self.residents: dict[int, Resident] = {}


class BankedLinear(nn.Module):
    """A linear module and the shelves with the changes to it.

    gains: [slots, out], DoRA's scale per slot, one where an adapter has none; None until there is one
    """

    def __init__(self, base: nn.Module, name: str, *, shelves: Mapping[int, Shelf], step: Step) -> None:
        super().__init__()
        self.base = base
        self.gains: Tensor | None = None
        self.name = name
        self._shelves = shelves
        self._step = step
        self._alone: Parts | None = None

    @property
    def weight(self) -> Tensor:
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        if self._step.plan is None:
            return y
        rows = y.reshape(-1, y.shape[-1])
        self.change(rows, x.reshape(-1, x.shape[-1]))
        return rows.view(y.shape)

    def change(self, y: Tensor, x: Tensor) -> None:
        """Add to the adapted rows of y [tokens, out], which is base(x), what their adapters make of x [tokens, in].

        Every other row keeps every bit: rows are picked and put back by index, never multiplied by a mask, since
        zero times an infinite value is not zero.
        """
        if self._alone is None:
            self._alone = Parts(((0, y.shape[1], self),))
        self._alone.change(y, x)

    @property
    def step(self) -> Step:
        """What this step's rows are adapted with."""
        return self._step

    def apply_gains(self, y: Tensor, gains: Sequence[Gains]) -> None:
        """Have DoRA's gains change rows of y [tokens, out], which is base(x) yet: the base without its bias."""
        if self.gains is None:
            return
        added = []
        for each in gains:
            base, gain = y.index_select(0, each.rows), self.gains.index_select(0, each.slots)
            base = base if self.bias is None else base - self.bias
            added.append((base * (gain - 1) * each.factors[:, None]).to(y.dtype))
        for each, more in zip(gains, added, strict=True):
            y.index_add_(0, each.rows, more)

    @property
    def num_changes(self) -> tuple[int, ...]:
        """Other numbers where its stacks are others."""
        return tuple(shelf.num_changes for shelf in self._shelves.values())

    @property
    def stacks(self) -> dict[int, Stack]:
        """What is stacked for it now, by rank; another thread may be about to take a shelf's stacks away."""
        found = ((rank, shelf.stacks.get(self.name)) for rank, shelf in self._shelves.items())
        return {rank: stack for rank, stack in found if stack is not None}


class Parts:
    """Linears of one bank that read one input, and whose outputs lie side by side."""

    def __init__(self, parts: Sequence[tuple[int, int, BankedLinear]]) -> None:
        """parts: columns of the outputs from … to, and the linear that they are of"""
        self._parts = tuple(parts)
        self._made_of: tuple[AdapterKernels, tuple[int, ...]] | None = None
        self._adding: Adding | None = None

    def change(self, y: Tensor, x: Tensor) -> None:
        """Change the adapted rows of y [tokens, all outputs], which is what the linears have made of x [tokens, in]."""
        step = self.step
        if step is None or step.plan is None:
            return
        plan = step.plan
        if x.shape[0] != plan.num_tokens:
            raise RuntimeError(f"{self._parts[0][2].name} was given {x.shape[0]} rows in a step of {plan.num_tokens}")
        for begin, end, linear in self._parts:
            linear.apply_gains(y[:, begin:end], plan.gains)
        self.added_by(step.kernels)(y, x, step.tiles)

    @property
    def step(self) -> Step | None:
        """What this step's rows are adapted with; None where no adapter can change these."""
        return self._parts[0][2].step if self._parts else None

    def added_by(self, kernels: AdapterKernels) -> Adding:
        """Made once for as long as the stacks are the same tensors; another thread may be about to change them."""
        made_of = kernels, self._parts[0][2].num_changes
        if self._adding is None or made_of != self._made_of:
            found = [AdaptedLinear(begin=begin, end=end, stacks=linear.stacks) for begin, end, linear in self._parts]
            self._adding, self._made_of = kernels.adding(found), made_of
        return self._adding


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
                inner = apply_gate(base, self._product(x[rows], "gate_up_proj", expert, mix))
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
