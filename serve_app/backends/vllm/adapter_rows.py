"""Adapters' rows on CPUs, by our kernels.

vLLM's own code for CPUs reads an adapter anew for each row, and computes rows without one with the last slot's:
they have the index -1 there. So each layer gets one more slot, of zeros, that nobody fills.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from serve_app.engine.lora.buckets import Stack, new_stack, shelf_rank
from serve_app.engine.lora.plan import Resident, lay_tiles
from serve_app.kernels.forms import AdaptedLinear, AdapterKernels, AdapterTiles, Adding, PlainKernels
from serve_app.kernels.interface import adapter_kernels

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def take_over_rows(core: EngineCore) -> None:
    """Have our kernels compute what adapters change. Call it before any adapter is loaded."""
    (model,) = core.collective_rpc("get_model")
    manager = model.lora_manager
    layers = tuple(manager.modules.values())
    linears = [layer for layer in layers if isinstance(layer, BaseLinearLayerWithLoRA)]
    for layer in layers:
        add_empty_slot(layer)
    rank = shelf_rank(manager.lora_config.max_lora_rank)
    kernels = kernels_for(linears, rank, manager.lora_config.lora_dtype)
    rows = {
        name: AdapterRows(manager.max_num_batched_tokens, manager.max_num_seqs, rank=rank, kernels=kernels)
        for name in manager.punica_wrapper_mapping
    }
    by_former = {id(former): rows[name] for name, former in manager.punica_wrapper_mapping.items()}
    for layer in layers:
        layer.set_mapping(by_former[id(layer.punica_wrapper)])
    manager.punica_wrapper_mapping = rows


class AdapterRows(PunicaWrapperCPU):  # type: ignore[misc]  # vLLM may be missing
    """Knows which rows of a step have an adapter, and computes these alone.

    rank: of all slots
    """

    def __init__(self, max_tokens: int, max_sequences: int, *, rank: int, kernels: AdapterKernels) -> None:
        super().__init__(max_tokens, max_sequences, torch.device("cpu"))
        self._rank, self._kernels = rank, kernels
        self._tiles: tuple[AdapterTiles, ...] = ()
        self._adding: dict[int, Adding] = {}

    def update_metadata(self, *args: Any, **options: Any) -> None:
        """Note the rows of a step, if they are others than the last one's."""
        super().update_metadata(*args, **options)
        places = self.token_lora_indices.tolist()
        mixes = [((place, 1.0),) if place >= 0 else () for place in places]
        residents = {
            place: Resident(version="", rank=self._rank, place=place, has_gain=False) for place in {*places} - {-1}
        }
        size = self._kernels.tile_rows
        self._tiles = lay_tiles(mixes, residents, tile_rows=size, device=self.device) if residents else ()

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Sequence[Tensor],
        lora_b_stacked: Sequence[Tensor],
        *_: Any,
        **__: Any,
    ) -> None:
        """Add to rows of y [tokens, out] what their adapters make of x [tokens, in]; no other row is touched."""
        if not self._tiles:
            return
        layer = lora_b_stacked[0].data_ptr()
        if layer not in self._adding:
            self._adding[layer] = self._kernels.adding(parts_of(lora_a_stacked, lora_b_stacked))
        self._adding[layer](y, x, self._tiles)


def add_empty_slot(layer: Any) -> None:
    """Give a layer one more slot; those of linears lie in memory as our kernels read them."""
    if not isinstance(layer, BaseLinearLayerWithLoRA):
        if isinstance(layer.lora_b_stacked, Tensor):
            layer.lora_b_stacked = torch.cat([layer.lora_b_stacked, torch.zeros_like(layer.lora_b_stacked[:1])])
        return
    stacks = [
        new_stack(len(down) + 1, shelf_rank(up.shape[-1]), up.new_empty(1).expand(up.shape[-2], down.shape[-1]))
        for down, up in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
    ]
    layer.lora_a_stacked = tuple(stack.down[:, None] for stack in stacks)
    layer.lora_b_stacked = tuple(stack.up[:, None] for stack in stacks)


def kernels_for(layers: Iterable[Any], rank: int, dtype: torch.dtype) -> AdapterKernels:
    frames = [
        part.stacks[rank].up[0, :, :1].expand(-1, part.stacks[rank].down.shape[-1])
        for layer in layers
        for part in parts_of(layer.lora_a_stacked, layer.lora_b_stacked)
    ]
    found = adapter_kernels(frames, [rank], device=torch.device("cpu"), dtype=dtype, uses_triton=False)
    return found or PlainKernels()


def parts_of(downs: Sequence[Tensor], ups: Sequence[Tensor]) -> list[AdaptedLinear]:
    """downs: [slots, 1, rank, in] of linears side by side;  ups: [slots, 1, out, rank]"""
    parts, begin = list[AdaptedLinear](), 0
    for down, up in zip(downs, ups, strict=True):
        outputs, rank = up.shape[-2:]
        stacks = {rank: Stack(down=down[:, 0], up=up[:, 0])}
        parts.append(AdaptedLinear(begin=begin, end=begin + outputs, stacks=stacks))
        begin += outputs
    return parts
