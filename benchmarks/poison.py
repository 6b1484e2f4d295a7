"""Adapters for measurements: harmless ones, one that overflows always, one that overflows for a single token only."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from serve_app.engine.lora.adapter import linear_modules
from tests.engine.adapter_files import save_adapter

CALM = "calm"
HUGE = "huge"
SELECTIVE = "selective"
SPARE = tuple(f"spare-{number}" for number in range(6))
POISONED_TOKEN = 77
PROBED_TOKENS = 4
OVERFLOWING = 4e19  # its square is no finite number in float32 or bfloat16


def make_adapters(model: Path, folder: Path) -> None:
    """Write all of them for a model, in a process of its own so that the memory is given back."""
    process = multiprocessing.get_context("spawn").Process(target=_make, args=(model, folder))
    process.start()
    process.join()
    assert process.exitcode == 0, "the adapters could not be made"


def _make(model: Path, folder: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(model, local_files_only=True).eval().requires_grad_(False)
    for seed, name in enumerate((CALM, *SPARE)):
        save_adapter(folder / name, module, rank=8, seed=seed, targets=("q_proj", "v_proj"))
    save_adapter(folder / HUGE, module, rank=4, targets=("q_proj", "v_proj"), down=1e38, up=1.0)
    _save_selective(folder / SELECTIVE, module)


def _save_selective(folder: Path, module: Any) -> None:
    """Two factors of one channel, whose product overflows for a prompt that repeats one token and for no other."""
    name = next(name for name in linear_modules(module) if name.endswith("mlp.gate_proj"))
    gate = module.get_submodule(name)
    vocab = int(module.config.vocab_size)
    probed = _inputs(module, gate, (torch.arange(PROBED_TOKENS) * 7919 + 11) % vocab)
    repeated = _inputs(module, gate, torch.full((PROBED_TOKENS,), POISONED_TOKEN))[-1]
    others, _ = torch.linalg.qr(probed.T)
    direction = repeated - others @ (others.T @ repeated)
    direction /= direction @ repeated
    up = torch.zeros(gate.weight.shape[0], 1)
    up[0] = OVERFLOWING
    tensors = {}
    for module_name in (name, name.replace("gate_proj", "up_proj")):
        tensors[f"base_model.model.{module_name}.lora_A.weight"] = direction[None].clone()
        tensors[f"base_model.model.{module_name}.lora_B.weight"] = up.clone()
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    save_file(tensors, folder / "adapter_model.safetensors")


@torch.inference_mode()
def _inputs(module: Any, layer: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """What a layer is handed for each of the tokens, [tokens, in] float32."""
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].float()))
    module(input_ids=token_ids[None], use_cache=False)
    handle.remove()
    return seen[0]
