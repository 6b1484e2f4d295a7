"""A base model from its folder, made ready for packed batches, or refused with the name of what is in the way."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from serve_app.engine.budget import check_weights_fit, context_within, kv_budget
from serve_app.engine.config import EngineConfig
from serve_app.engine.errors import ModelNotSupported
from serve_app.engine.kv.shape import KeyValueShape
from serve_app.engine.probe import probe
from serve_app.engine.quantized.checkpoint import Weight, open_checkpoint
from serve_app.engine.quantized.formats import formats_of
from serve_app.engine.rope import settle_longrope
from serve_app.engine.text_part import text_class, text_config

logger = logging.getLogger(__name__)

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with what the engine has to know of it.

    kv_cache_bytes: what its keys and values may take
    eos_token_ids:  tokens that end a text
    """

    module: PreTrainedModel
    shape: KeyValueShape
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    kv_cache_bytes: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def load_model(config: EngineConfig) -> LoadedModel:
    """Read the weights and check by a probe that attention through our seam gives the model's own logits.

    Raises ModelNotSupported.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    hf_config = AutoConfig.from_pretrained(config.path, local_files_only=True, trust_remote_code=False)
    _refuse_by_config(hf_config)
    device = choose_device(config.device)
    of_text = text_config(hf_config)
    dtype = (hf_config.dtype or of_text.dtype) if config.dtype == "auto" else getattr(torch, config.dtype)
    dtype = torch.float32 if dtype is None else dtype
    weights = _dequantised(config.path, hf_config)
    num_bytes = None if weights is None else sum(weight.num_bytes(dtype) for weight in weights.values())
    check_weights_fit(Path(config.path), device=device, num_bytes=num_bytes)
    module = _read_module(config.path, hf_config, dtype, weights).to(device).eval().requires_grad_(False)
    shape = probe(module)
    own_limit = int(of_text.max_position_embeddings)
    budget = kv_budget(config, shape, own_limit=own_limit, dtype=dtype, device=device)
    max_model_len = context_within(config, budget, own_limit=own_limit, bytes_per_token=shape.bytes_per_token(dtype))
    settle_longrope(module, max_model_len)
    if max_model_len < own_limit and config.max_model_len is None:
        logger.warning("%s: context of %d tokens instead of %d, for want of memory for keys and values", config.name,
                       max_model_len, own_limit)  # fmt: skip
    return LoadedModel(
        module=module,
        shape=shape,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        kv_cache_bytes=budget,
        vocab_size=int(of_text.vocab_size),
        eos_token_ids=read_eos_token_ids(config.path, of_text),
    )


def _read_module(path: str, hf_config: Any, dtype: torch.dtype, weights: dict[str, Weight] | None) -> PreTrainedModel:
    """The model with its weights, all of them found. Weights that are given are those of the folder, dequantised."""
    source = {"pretrained_model_name_or_path": path} if weights is None else {"state_dict": weights}
    try:
        module, found = text_class(hf_config).from_pretrained(
            **{"pretrained_model_name_or_path": None, **source},
            config=hf_config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except ImportError as error:
        raise ModelNotSupported(f"{hf_config.model_type}: {_package_of(error)}") from error
    lacking = sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    if lacking:
        named = ", ".join(lacking[:5]) + (" …" if len(lacking) > 5 else "")
        raise ModelNotSupported(f"{hf_config.model_type}: {len(lacking)} weights are not in the checkpoint: {named}")
    loaded: PreTrainedModel = module
    return loaded


def _dequantised(path: str, hf_config: Any) -> dict[str, Weight] | None:
    """A quantised checkpoint's weights; None where they are plain. Takes the announcement out of the configuration."""
    settings = getattr(hf_config, "quantization_config", None)
    if settings is None:
        return None
    fields = settings if isinstance(settings, dict) else settings.to_dict()
    formats = formats_of(fields, hf_config.model_type)
    for config in (hf_config, text_config(hf_config)):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    return open_checkpoint(Path(path), formats)


def _package_of(error: ImportError) -> str:
    """Which package a model wants, in words shorter than transformers' own."""
    if "timm" in str(error):
        return "it needs the packages timm and pillow, even for text alone: pip install timm pillow"
    return f"it needs a package that is not installed: {str(error).strip().splitlines()[0]}"


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelNotSupported("device: cuda was asked for, but torch sees no CUDA device")
    return torch.device(name)


def read_eos_token_ids(path: str, hf_config: Any) -> frozenset[int]:
    """The ids that end a text: generation_config.json's where there is one, else config.json's."""
    try:
        eos = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    except OSError:
        eos = None
    if eos is None:
        eos = hf_config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset([int(eos)])


def _refuse_by_config(hf_config: Any) -> None:
    name = hf_config.model_type
    if getattr(hf_config, "is_encoder_decoder", False):
        raise ModelNotSupported(f"{name}: encoder-decoder models are not supported")
    of_text = text_config(hf_config)
    for layer_type in getattr(of_text, "layer_types", None) or ():
        if layer_type not in SUPPORTED_LAYER_TYPES:
            raise ModelNotSupported(f"{name}: layers of type {layer_type} are not supported")
    length = getattr(of_text, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelNotSupported(f"{name}: config.json has no max_position_embeddings")
