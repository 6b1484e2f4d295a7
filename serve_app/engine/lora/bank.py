"""All resident adapters at once: stacked low-rank factors and a mask that gives each row its own.

With S slots of rank r, `h = x @ down.T` is computed for every slot ([tokens, S*r]), masked to the row's slot, and
`y += h @ up.T`: two dense products, whatever the mix of adapters, with no gather and no loop. Masked columns add
exact zeros; all tensors are finite (checked when an adapter is loaded).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from serve_app.engine.lora.adapter import Adapter, LowRank


class AdapterBank:
    """The adapters of one model: known versions in host memory, some of them resident in slots.

    slots: places; rank: columns per slot, the largest rank of any known adapter
    """

    def __init__(self, model: nn.Module, adapters: Iterable[Adapter], *, max_slots: int) -> None:
        self._adapters = {adapter.version: adapter for adapter in adapters}
        self.num_slots = min(max_slots, len(self._adapters))
        self.rank = max((adapter.rank for adapter in self._adapters.values()), default=0)
        self._wrapped: dict[str, BankedLinear] = {}
        self._row_slots: Tensor | None = None
        self._mask: Tensor | None = None
        for name in sorted({name for adapter in self._adapters.values() for name in adapter.modules}):
            self._wrapped[name] = self._wrap(model, name)
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype

    @property
    def versions(self) -> frozenset[str]:
        return frozenset(self._adapters)

    def load(self, slot: int, version: str) -> None:
        """Move a known version into a slot, in place of what was there."""
        adapter = self._adapters[version]
        for name, linear in self._wrapped.items():
            linear.set_slot(slot, adapter.modules.get(name), rank=self.rank)

    def begin_step(self, row_slots: Sequence[int]) -> None:
        """Say which slot each packed token uses; -1 is the base. A step without adapters costs nothing."""
        if not any(slot >= 0 for slot in row_slots):
            return
        slots = torch.tensor(row_slots, device=self._device)
        one_hot = slots[:, None] == torch.arange(self.num_slots, device=self._device)
        self._mask = one_hot.to(self._dtype).repeat_interleave(self.rank, dim=1)
        self._row_slots = slots
        for linear in self._wrapped.values():
            linear.mask, linear.row_slots = self._mask, slots

    def end_step(self) -> None:
        self._mask = self._row_slots = None
        for linear in self._wrapped.values():
            linear.mask = linear.row_slots = None

    def _wrap(self, model: nn.Module, name: str) -> BankedLinear:
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        wrapped = BankedLinear(model.get_submodule(name), num_slots=self.num_slots, rank=self.rank)
        setattr(parent, child, wrapped)
        return wrapped


class BankedLinear(nn.Module):
    """A linear module with a place for every slot's change to it.

    down:  [slots * rank, in];  up: [out, slots * rank]
    gains: [slots + 1, out], DoRA's scale per slot, the last row of ones for the base; None until a slot has one
    """

    def __init__(self, base: nn.Module, *, num_slots: int, rank: int) -> None:
        super().__init__()
        self.base = base
        weight: Tensor = base.weight  # type: ignore[assignment]
        is_transposed = isinstance(base, Conv1D)
        in_features, out_features = weight.shape if is_transposed else weight.shape[::-1]
        self._num_slots = num_slots
        self.down = weight.new_zeros(num_slots * rank, in_features)
        self.up = weight.new_zeros(out_features, num_slots * rank)
        self.gains: Tensor | None = None
        self.mask: Tensor | None = None
        self.row_slots: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias  # type: ignore[return-value]

    def set_slot(self, slot: int, low_rank: LowRank | None, *, rank: int) -> None:
        """Fill a slot, or empty it."""
        columns = slice(slot * rank, (slot + 1) * rank)
        self.down[columns].zero_()
        self.up[:, columns].zero_()
        if self.gains is not None:
            self.gains[slot].fill_(1.0)
        if low_rank is None:
            return
        used = slice(slot * rank, slot * rank + low_rank.rank)
        self.down[used].copy_(low_rank.down)
        self.up[:, used].copy_(low_rank.up)
        if low_rank.gain is not None:
            if self.gains is None:
                self.gains = self.up.new_ones(self._num_slots + 1, self.up.shape[0])
            self.gains[slot].copy_(low_rank.gain)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        if self.mask is None or self.row_slots is None:
            return y
        rows = x.reshape(-1, x.shape[-1])
        assert rows.shape[0] == self.mask.shape[0], "an adapted module saw other rows than the batch's"
        change = ((rows @ self.down.T) * self.mask) @ self.up.T
        if self.gains is None:
            return y + change.view_as(y)
        flat = y.reshape(change.shape)
        gain = self.gains[self.row_slots]  # -1 takes the last row, which is ones
        bias = self.bias
        scaled = (flat + change) * gain if bias is None else (flat - bias + change) * gain + bias
        has_gain = (gain != 1.0).any(dim=1, keepdim=True)  # rows without keep every bit of theirs
        return torch.where(has_gain, scaled, flat + change).view_as(y)
