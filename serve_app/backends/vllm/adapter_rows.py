"""Adapters' rows on CPUs, by our kernels, within the step that vLLM compiles.

vLLM's own code for CPUs reads an adapter anew for each row, and computes rows without one with the last slot's:
they have the index -1 there. So each layer gets one more slot, of zeros, that nobody fills. It also compiles no step of
a model that may have adapters (vllm/platforms/cpu.py). Our kernels are one custom operator in the compiled step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.v1.worker.cpu_worker import CPUWorker

from serve_app.engine.lora.buckets import Stack, new_stack, shelf_rank
from serve_app.engine.lora.plan import Resident, lay_tiles
from serve_app.kernels.forms import AdaptedLinear, AdapterKernels, AdapterTiles, PlainKernels
from serve_app.kernels.interface import adapter_kernels


class AdapterWorker(CPUWorker):  # type: ignore[misc]  # vLLM may be missing
    """Has our kernels compute what adapters change: before the step is compiled, and before any is loaded."""

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        model = self.get_model()
        if not take_over_rows(model.lora_manager, self.vllm_config):
            for module in model.modules():
                if hasattr(module, "do_not_compile"):
                    module.do_not_compile = True


def take_over_rows(manager: Any, config: VllmConfig) -> bool:
    """Return whether the step may be compiled: not where vLLM's own code computes what adapters change of some layer.

    manager: of vLLM's, which knows the layers that adapters may change
    """
    linears = {name: each for name, each in manager.modules.items() if isinstance(each, BaseLinearLayerWithLoRA)}
    for layer in manager.modules.values():
        add_empty_slot(layer)
    rank = shelf_rank(manager.lora_config.max_lora_rank)
    kernels = kernels_for(linears.values(), rank, manager.lora_config.lora_dtype)
    rows = {
        name: AdapterRows(manager.max_num_batched_tokens, manager.max_num_seqs, rank=rank, kernels=kernels)
        for name in manager.punica_wrapper_mapping
    }
    by_former = {id(former): rows[name] for name, former in manager.punica_wrapper_mapping.items()}
    for name, layer in manager.modules.items():
        theirs = by_former[id(layer.punica_wrapper)]
        if name not in linears:
            layer.set_mapping(theirs)
            continue
        place = f"{name}.adapters"
        layer.set_mapping(LayerRows(place))
        adding = theirs.kernels.adding(parts_of(layer.lora_a_stacked, layer.lora_b_stacked))
        config.compilation_config.static_forward_context[place] = (theirs, adding)
    manager.punica_wrapper_mapping = rows
    kinds = BaseLinearLayerWithLoRA, LogitsProcessorWithLoRA  # the second is not part of the compiled step
    return all(isinstance(layer, kinds) for layer in manager.modules.values())


def add_adapters(y: Tensor, x: Tensor, place: str) -> None:
    """Add to rows of y [tokens, out] what their adapters make of x [tokens, in]; no other row is touched.

    place: of the layer, where vLLM keeps what a compiled step finds by name
    """
    rows, adding = get_forward_context().no_compile_layers[place]
    if rows.tiles:
        adding(y, x, rows.tiles)


LIBRARY = torch.library.Library("serve_app", "FRAGMENT")
LIBRARY.define("add_adapters(Tensor(a!) y, Tensor x, str place) -> ()")
LIBRARY.impl("add_adapters", add_adapters, "CPU")
torch.library.register_fake("serve_app::add_adapters", lambda y, x, place: None, lib=LIBRARY)


class LayerRows:
    """What a linear asks of vLLM's `punica_wrapper`."""

    def __init__(self, place: str) -> None:
        self._place = place

    def add_lora_linear(self, y: Tensor, x: Tensor, *_: Any) -> None:
        torch.ops.serve_app.add_adapters(y, x, self._place)


class AdapterRows(PunicaWrapperCPU):  # type: ignore[misc]  # vLLM may be missing
    """Knows which rows of a step have an adapter.

    rank:  of all slots
    tiles: these rows
    """

    def __init__(self, max_tokens: int, max_sequences: int, *, rank: int, kernels: AdapterKernels) -> None:
        super().__init__(max_tokens, max_sequences, torch.device("cpu"))
        self._rank, self.kernels = rank, kernels
        self.tiles: tuple[AdapterTiles, ...] = ()

    def update_metadata(self, *args: Any, **options: Any) -> None:
        """Note the rows of a step, if they are others than the last one's."""
        super().update_metadata(*args, **options)
        places = self.token_lora_indices.tolist()
        mixes = [((place, 1.0),) if place >= 0 else () for place in places]
        residents = {
            place: Resident(version="", rank=self._rank, place=place, has_gain=False) for place in {*places} - {-1}
        }
        size = self.kernels.tile_rows
        self.tiles = lay_tiles(mixes, residents, tile_rows=size, device=self.device) if residents else ()


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
