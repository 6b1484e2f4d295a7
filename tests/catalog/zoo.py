"""Makes adapters on disk, sound ones and broken ones, from small tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
SOUND_CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "demo",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_dora": False,
}


def array(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.ones(shape, dtype=dtype)


def pair(module: str = MODULE, *, rank: int = 4, dtype: str = "float32") -> dict[str, np.ndarray[Any, Any]]:
    return {
        f"{module}.lora_A.weight": array(rank, 6, dtype=dtype),
        f"{module}.lora_B.weight": array(5, rank, dtype=dtype),
    }


def raw_file(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header, a string taken as it is."""
    encoded = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def entry(shape: list[Any], begin: int, end: int, *, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_adapter(
    folder: Path,
    *,
    config: Mapping[str, Any] | str | None = SOUND_CONFIG,
    weights: Mapping[str, np.ndarray[Any, Any]] | bytes | None = None,
) -> Path:
    """Write an adapter; without arguments a sound one. A string or bytes are written as they are."""
    folder.mkdir(parents=True)
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    content = weights if isinstance(weights, bytes) else save(dict(pair() if weights is None else weights))
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder
