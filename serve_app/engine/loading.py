"""A base model from its folder, made ready for packed batches, or refused with the name of what is in the way."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from serve_app.engine.attention import attend
from serve_app.engine.config import EngineConfig
from serve_app.engine.kv.store import KeyValueShape

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
REFUSED_ROPE_TYPES = {"dynamic", "longrope"}  # they look at the longest row of the batch
PROBE_LENGTH = 24


class ModelNotSupported(ValueError):
    """The model has something that this engine does not carry out; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with what the engine has to know of it.

    eos_token_ids: tokens that end a text
    """

    module: PreTrainedModel
    shape: KeyValueShape
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
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
    dtype = hf_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    dtype = torch.float32 if dtype is None else dtype
    module = AutoModelForCausalLM.from_pretrained(
        config.path,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation="eager",
    )
    module = module.to(device).eval().requires_grad_(False)
    shape = probe(module)
    own_limit = int(hf_config.max_position_embeddings)
    tokens_in_budget = config.kv_cache_bytes // shape.bytes_per_token(dtype)
    tokens_in_budget -= tokens_in_budget % config.block_size
    max_model_len = min(config.max_model_len or own_limit, own_limit, tokens_in_budget)
    if max_model_len < config.block_size:
        raise ModelNotSupported(f"kv_cache_bytes={config.kv_cache_bytes} holds only {max_model_len} tokens")
    return LoadedModel(
        module=module,
        shape=shape,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        vocab_size=int(hf_config.vocab_size),
        eos_token_ids=read_eos_token_ids(config.path, hf_config),
    )


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
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ModelNotSupported(f"{name}: quantization_config is not supported")
    if getattr(hf_config, "vision_config", None) is not None:
        raise ModelNotSupported(f"{name}: vision_config (images) is not supported")
    for layer_type in getattr(hf_config, "layer_types", None) or ():
        if layer_type not in SUPPORTED_LAYER_TYPES:
            raise ModelNotSupported(f"{name}: layers of type {layer_type} are not supported")
    for rope_type in _rope_types(getattr(hf_config, "rope_parameters", None) or {}):
        if rope_type in REFUSED_ROPE_TYPES:
            raise ModelNotSupported(f"{name}: rope_type {rope_type} is not supported")
    if not isinstance(getattr(hf_config, "max_position_embeddings", None), int):
        raise ModelNotSupported(f"{name}: config.json has no max_position_embeddings")


def _rope_types(parameters: dict[str, Any]) -> list[str]:
    own = [parameters["rope_type"]] if "rope_type" in parameters else []
    return own + [t for value in parameters.values() if isinstance(value, dict) for t in _rope_types(value)]


@torch.inference_mode()
def probe(module: PreTrainedModel) -> KeyValueShape:
    """Run a few tokens through the model's own attention and through ours and compare the logits.

    Returns the shape of keys and values, as seen. Leaves the model with its own attention.
    """
    length = min(PROBE_LENGTH, int(module.config.max_position_embeddings))
    vocab = int(module.config.vocab_size)
    ids = (torch.arange(length, device=module.device) * 7919 + 11)[None] % vocab
    positions = torch.arange(length, device=module.device)[None]
    own = module(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
    recorder = _Recorder(length)
    ALL_ATTENTION_FUNCTIONS.register("serve_app_probe", recorder)
    try:
        module.set_attn_implementation("serve_app_probe")
        ours = module(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
    except (ValueError, TypeError) as error:
        raise ModelNotSupported(f"{module.config.model_type}: {error}") from error
    finally:
        module.set_attn_implementation("eager")
    shape = recorder.shape(module)
    tolerance = 1e-3 if module.dtype == torch.float32 else 0.05
    limit = tolerance * max(1.0, float(own.abs().max()))
    difference = float((own - ours).abs().max())
    if not difference <= limit:
        raise ModelNotSupported(
            f"{module.config.model_type}: logits through the engine's attention are off by {difference:.2g}"
            f" (allowed: {limit:.2g})"
        )
    return shape


class _Recorder:
    """Attention over one plain causal sequence that notes what each layer hands it."""

    def __init__(self, length: int) -> None:
        self._causal = torch.ones(length, length, dtype=torch.bool).tril()
        self._seen: dict[int, tuple[int, int, int]] = {}

    def __call__(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise ValueError("the model makes attention masks of its own")
        if not getattr(layer, "is_causal", True):
            raise ValueError("attention that is not causal is not supported")
        heads, kv_heads, length, dim = query.shape[1], key.shape[1], query.shape[2], query.shape[3]
        self._seen[int(layer.layer_idx)] = (kv_heads, key.shape[-1], value.shape[-1])
        mask = self._causal.to(query.device)
        if sliding_window is not None:
            mask = mask & mask.new_ones(mask.shape).triu(1 - sliding_window)
        folded = query.reshape(1, kv_heads, -1, dim)
        attended = attend(
            folded,
            key,
            value,
            mask=mask.repeat(heads // kv_heads, 1)[None, None],
            scale=dim**-0.5 if scaling is None else scaling,
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.view(kv_heads, -1, 1).expand(-1, -1, length),
        )
        return attended.reshape(1, heads, length, -1).transpose(1, 2), None

    def shape(self, module: PreTrainedModel) -> KeyValueShape:
        name = module.config.model_type
        if not self._seen:
            raise ModelNotSupported(f"{name}: its attention does not go through AttentionInterface")
        layers = len(self._seen)
        if sorted(self._seen) != list(range(layers)) or layers != module.config.num_hidden_layers:
            raise ModelNotSupported(f"{name}: only layers {sorted(self._seen)} use AttentionInterface")
        if len(set(self._seen.values())) > 1:
            raise ModelNotSupported(f"{name}: layers differ in heads or head size")
        heads, key_dim, value_dim = self._seen[0]
        return KeyValueShape(layers=layers, heads=heads, key_dim=key_dim, value_dim=value_dim)
