"""What is known of an adapter without its weights: which modules it changes and how, or why it is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from serve_app.engine.lora.errors import AdapterRefused
from serve_app.engine.lora.weights_file import WeightsFile

__all__ = ["Adapter", "AdapterRefused", "Change", "linear_modules", "load_adapter", "weight_of"]

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
TENSOR_NAME = re.compile(r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")
DTYPES = frozenset({"F16", "BF16", "F32", "F64"})
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an adapter does to one linear module: y += scaling * up @ (down @ x), then DoRA's magnitude.

    down, up, magnitude: names of the tensors in the file; [rank, in], [out, rank], [out]; magnitude only with DoRA
    """

    rank: int
    scaling: float
    down: str
    up: str
    magnitude: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter version: facts in memory, weights in their file until it moves into a slot.

    changes: by the module's name
    """

    version: str
    file: WeightsFile
    changes: Mapping[str, Change]

    @property
    def rank(self) -> int:
        return max(change.rank for change in self.changes.values())


def load_adapter(folder: Path, *, version: str, model: nn.Module) -> Adapter:
    """Read a PEFT LoRA folder's configuration and header, and bind each tensor to a linear module of the model.

    Raises AdapterRefused. The weights themselves are read, and judged, where they move in.
    """
    try:
        config = LoraConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, OSError) as error:
        raise AdapterRefused(f"adapter_config.json: {error}") from error
    _refuse_by_config(config)
    try:
        file = WeightsFile(folder / WEIGHTS)
        parts = _read_parts(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise AdapterRefused(f"{WEIGHTS}: {error}") from error
    if not parts:
        raise AdapterRefused(f"{WEIGHTS} holds no lora_A")
    linears = linear_modules(model)
    changes = {name: _bind(name, tensors, linears=linears, config=config) for name, tensors in sorted(parts.items())}
    return Adapter(version=version, file=file, changes=changes)


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that an adapter may change, by name: linear layers before the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def weight_of(module: nn.Module) -> Tensor:
    """The module's weight as [out, in]; transformers' Conv1D keeps it the other way round."""
    weight: Any = module.weight
    return weight.T if isinstance(module, Conv1D) else weight


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    key: str
    shape: tuple[int, ...]


def _refuse_by_config(config: LoraConfig) -> None:
    if config.bias != "none":
        raise AdapterRefused(f"bias={config.bias!r} is not supported (allowed: 'none')")
    for field in UNSUPPORTED_FIELDS:
        value = getattr(config, field, None)
        if value:
            raise AdapterRefused(f"{field}={value!r} is not supported")


def _read_parts(path: Path) -> dict[str, dict[str, _Part]]:
    """The header's tensors by module and part; none of the data is touched."""
    parts: dict[str, dict[str, _Part]] = {}
    with safe_open(path, framework="pt") as header:
        for key in header.keys():  # noqa: SIM118  (no mapping)
            found = TENSOR_NAME.fullmatch(key.removeprefix(PREFIX))
            if found is None:
                raise AdapterRefused(f"tensor {key} is not supported (allowed: lora_A, lora_B, lora_magnitude_vector)")
            tensor = header.get_slice(key)
            if tensor.get_dtype() not in DTYPES:
                raise AdapterRefused(f"tensor {key} is {tensor.get_dtype()} (allowed: {', '.join(sorted(DTYPES))})")
            parts.setdefault(found["module"], {})[found["part"]] = _Part(key=key, shape=tuple(tensor.get_shape()))
    return parts


def _bind(name: str, parts: Mapping[str, _Part], *, linears: Mapping[str, nn.Module], config: LoraConfig) -> Change:
    if name not in linears:
        raise AdapterRefused(f"the model has no linear module {name} that an adapter may change")
    if "lora_A" not in parts or "lora_B" not in parts:
        raise AdapterRefused(f"module {name} lacks {'lora_A' if 'lora_A' not in parts else 'lora_B'}")
    down, up = parts["lora_A"], parts["lora_B"]
    out_features, in_features = weight_of(linears[name]).shape
    rank = down.shape[0] if down.shape else 0
    if not rank or down.shape != (rank, in_features) or up.shape != (out_features, rank):
        raise AdapterRefused(
            f"module {name}: lora_A {down.shape} and lora_B {up.shape} do not fit its weight"
            f" {(out_features, in_features)}"
        )
    return Change(
        rank=rank,
        scaling=_scaling(name, rank, config),
        down=down.key,
        up=up.key,
        magnitude=_magnitude(name, parts.get("lora_magnitude_vector"), out_features, config),
    )


def _magnitude(name: str, part: _Part | None, out_features: int, config: LoraConfig) -> str | None:
    if config.use_dora and (part is None or part.shape not in ((out_features,), (out_features, 1), (1, out_features))):
        raise AdapterRefused(f"module {name}: use_dora needs a lora_magnitude_vector of {out_features} values")
    if part is not None and not config.use_dora:
        raise AdapterRefused(f"module {name} has a lora_magnitude_vector, but use_dora is false")
    return None if part is None else part.key


def _scaling(name: str, rank: int, config: LoraConfig) -> float:
    """alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv 2312.03732); patterns match as PEFT's do."""
    alpha = config.lora_alpha
    for pattern, value in (config.alpha_pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            alpha = value
            break
    return float(alpha / rank**0.5 if config.use_rslora else alpha / rank)
