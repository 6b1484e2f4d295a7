"""Writes PEFT adapter folders of chosen numbers, without training anything; and reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from serve_app.catalog.adapters import read_adapter
from serve_app.engine.lora.adapter import Adapter, bind_adapter, linear_modules, weight_of
from serve_app.engine.lora.matching import Matcher
from serve_app.engine.lora.pool import AdapterBank


def save_adapter(
    folder: Path,
    model: nn.Module,
    *,
    rank: int = 4,
    seed: int = 0,
    alpha: float | None = None,
    targets: Items[str] = ("",),
    down: float | None = None,
    up: float | None = None,
    use_dora: bool = False,
    magnitude_noise: float = 0.3,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write an adapter for the linear modules whose names end as `targets` say.

    down, up: one number for all values of lora_A, lora_B; None draws them
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    chosen = {name: each for name, each in linear_modules(model).items() if name.endswith(tuple(targets))}
    for name, linear in chosen.items():
        if linear is head and "" in targets:
            continue
        weight = weight_of(linear).detach().float()
        drawn_down = torch.randn(rank, weight.shape[1], generator=generator) * 0.2
        drawn_up = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = drawn_down if down is None else torch.full_like(drawn_down, down)
        tensors[f"{prefix}.lora_B.weight"] = drawn_up if up is None else torch.full_like(drawn_up, up)
        if use_dora:
            noise = 1 + magnitude_noise * torch.rand(weight.shape[0], generator=generator)
            tensors[f"{prefix}.lora_magnitude_vector"] = weight.norm(dim=1) * noise
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank if alpha is None else alpha,
        "use_dora": use_dora,
        "target_modules": [*chosen],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def load_adapter(folder: Path, *, version: str, model: nn.Module, sees: bool = False) -> Adapter:
    """Read an adapter's folder as the catalog does, and bind it under a version of one's own. Raises AdapterRefused."""
    record = replace(read_adapter(folder, root=folder.parent), version=version)
    if isinstance(model, PreTrainedModel):
        return bind_adapter(record, _matcher_of(Path(model.config.name_or_path), sees))
    return bind_adapter(record, Matcher(deepcopy(model).to("meta"), folder))


@lru_cache(maxsize=16)
def _matcher_of(folder: Path, sees: bool) -> Matcher:
    """One for all engines of a model: to match took a tenth of the time of their tests."""
    return Matcher.of_folder(folder, sees=sees)


def version_in(bank: AdapterBank, slot: int) -> str | None:
    """Return the version that rows of this slot are computed with; None where there is none yet."""
    resident = bank._residents.get(slot)
    return None if resident is None else resident.version
