"""An adapter's weights as the bank computes with them: read, scaled, in the model's dtype, judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from serve_app.engine.lora.adapter import Adapter, Change, weight_of
from serve_app.engine.lora.errors import AdapterRefused
from serve_app.engine.lora.matching import converted


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The change to one weight: y += up @ (down @ x), where scaling is inside `up` already.

    down: [rank, in];  up: [out, rank]; of experts [experts, rank, in] and [experts, out, rank]
    gain: [out], DoRA's m / |W + up @ down|, by which the module's output without bias is multiplied; None is 1
    """

    down: Tensor
    up: Tensor
    gain: Tensor | None = None

    @property
    def is_inert(self) -> bool:
        """Whether it leaves the module as it is, up to what the dtype cannot tell apart."""
        if bool(self.down.any()) and bool(self.up.any()):
            return False
        return self.gain is None or bool(((self.gain.float() - 1).abs() <= 4 * torch.finfo(self.gain.dtype).eps).all())


@torch.no_grad()
def read_weights(
    adapter: Adapter, model: nn.Module, linears: Mapping[str, nn.Module] | None, *, dtype: torch.dtype
) -> dict[str, LowRank]:
    """Read an adapter's file and give what it does to each weight, on the CPU.

    model:   or its shapes, as PEFT's conversion asks for
    linears: by name, with their weights; None where nothing is to be computed, and DoRA's gains are left out

    Raises AdapterRefused where the file has changed since it was registered, a value is not finite in the model's
    dtype, or nothing would change.
    """
    try:
        tensors = converted(model, load(adapter.file.read()), is_older=adapter.is_older)
    except SafetensorError as error:
        raise AdapterRefused(f"{adapter.file.path.name}: {error}") from error
    weights = {}
    for name, change in adapter.changes.items():
        linear = None if linears is None or change.magnitude is None else linears[name]
        weights[name] = _low_rank(name, change, tensors, linear, dtype=dtype)
    if all(low_rank.is_inert for low_rank in weights.values()):
        raise AdapterRefused(
            f"inert: lora_A or lora_B is zero in all of its {len(weights)} modules, so that it changes nothing"
            " (an adapter that was saved before it was trained looks like this; save it again after training)"
        )
    return weights


def _low_rank(
    name: str, change: Change, tensors: Mapping[str, Tensor], linear: nn.Module | None, *, dtype: torch.dtype
) -> LowRank:
    scaling, experts = change.target.scaling, change.target.experts
    down, up = tensors[change.down], tensors[change.up].float() * scaling
    gain = None
    if experts is not None:  # as PEFT lays them out
        down, up = down.unflatten(0, (experts, -1)), up.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if linear is not None and change.magnitude is not None:
        merged = weight_of(linear).detach().float().cpu() + up @ down.float()
        gain = tensors[change.magnitude].float().flatten() / torch.linalg.vector_norm(merged, dim=1)
        gain = _finite(gain.to(dtype), f"module {name}: DoRA's gain")
    return LowRank(
        down=_finite(down.to(dtype), f"tensor {change.down}"),
        up=_finite(up.to(dtype), f"tensor {change.up}, scaled by {scaling:g},"),
        gain=gain,
    )


def _finite(tensor: Tensor, what: str) -> Tensor:
    if not torch.isfinite(tensor).all():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise AdapterRefused(f"{what} holds values that are not finite in {dtype}")
    return tensor
