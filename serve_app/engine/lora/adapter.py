"""An adapter's tensors, bound to the modules of the model, or refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PREFIX = "base_model.model."
TENSOR_NAME = re.compile(r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")
UNSUPPORTED_FIELDS = (
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
    "alora_invocation_tokens",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "megatron_config",
)


class AdapterRefused(ValueError):
    """The adapter does not fit the model or needs what the engine does not carry out; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The change to one linear module: y += up @ (down @ x), where scaling is inside `up` already.

    down: [rank, in];  up: [out, rank]
    gain: [out], DoRA's m / |W + up @ down|, by which the module's output without bias is multiplied; None is 1
    """

    down: Tensor
    up: Tensor
    gain: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter version in host memory, by module name."""

    version: str
    modules: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        return max(low_rank.rank for low_rank in self.modules.values())


def load_adapter(folder: Path, *, version: str, model: nn.Module) -> Adapter:
    """Read a PEFT LoRA folder and bind each of its tensors to a linear module of the model.

    Raises AdapterRefused.
    """
    try:
        config = LoraConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, OSError) as error:
        raise AdapterRefused(f"adapter_config.json: {error}") from error
    _refuse_by_config(config)
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise AdapterRefused(f"adapter_model.safetensors: {error}") from error
    parts = _read_parts(tensors)
    linears = linear_modules(model)
    modules = {name: _bind(name, tensors, linears=linears, config=config) for name, tensors in sorted(parts.items())}
    if not modules:
        raise AdapterRefused("adapter_model.safetensors holds no lora_A")
    return Adapter(version=version, modules=modules)


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that an adapter may change, by name: linear layers before the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def _refuse_by_config(config: LoraConfig) -> None:
    if config.bias != "none":
        raise AdapterRefused(f"bias={config.bias!r} is not supported (allowed: 'none')")
    for field in UNSUPPORTED_FIELDS:
        value = getattr(config, field, None)
        if value:
            raise AdapterRefused(f"{field}={value!r} is not supported")


def _read_parts(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        found = TENSOR_NAME.fullmatch(key.removeprefix(PREFIX))
        if found is None:
            raise AdapterRefused(f"tensor {key} is not supported (allowed: lora_A, lora_B, lora_magnitude_vector)")
        if not torch.isfinite(tensor).all():
            raise AdapterRefused(f"tensor {key} holds values that are not finite")
        parts.setdefault(found["module"], {})[found["part"]] = tensor
    return parts


def _bind(name: str, tensors: Mapping[str, Tensor], *, linears: Mapping[str, nn.Module], config: LoraConfig) -> LowRank:
    if name not in linears:
        raise AdapterRefused(f"the model has no linear module {name} that an adapter may change")
    if "lora_A" not in tensors or "lora_B" not in tensors:
        raise AdapterRefused(f"module {name} lacks {'lora_A' if 'lora_A' not in tensors else 'lora_B'}")
    down, up = tensors["lora_A"].float(), tensors["lora_B"].float()
    weight = _weight(linears[name])
    out_features, in_features = weight.shape
    rank = down.shape[0]
    if tuple(down.shape) != (rank, in_features) or tuple(up.shape) != (out_features, rank):
        raise AdapterRefused(
            f"module {name}: lora_A {tuple(down.shape)} and lora_B {tuple(up.shape)} do not fit its weight"
            f" {tuple(weight.shape)}"
        )
    up = up * _scaling(name, rank, config)
    gain = None
    if config.use_dora:
        magnitude = tensors.get("lora_magnitude_vector")
        if magnitude is None or magnitude.numel() != out_features:
            raise AdapterRefused(f"module {name}: use_dora needs a lora_magnitude_vector of {out_features} values")
        merged = weight.detach().float().cpu() + up @ down
        gain = magnitude.float().flatten() / torch.linalg.vector_norm(merged, dim=1)
    elif "lora_magnitude_vector" in tensors:
        raise AdapterRefused(f"module {name} has a lora_magnitude_vector, but use_dora is false")
    return LowRank(down=down, up=up, gain=gain)


def _weight(module: nn.Module) -> Tensor:
    """The module's weight as [out, in]; transformers' Conv1D keeps it the other way round."""
    weight: Any = module.weight
    return weight.T if isinstance(module, Conv1D) else weight


def _scaling(name: str, rank: int, config: LoraConfig) -> float:
    """alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv 2312.03732); patterns match as PEFT's do."""
    alpha = config.lora_alpha
    for pattern, value in (config.alpha_pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            alpha = value
            break
    return float(alpha / rank**0.5 if config.use_rslora else alpha / rank)
