"""Makes small random models: weights from a seed, a byte-level tokenizer, a folder that loads like any other."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

NUM_BYTES = 256
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>")
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
MAX_MODEL_LEN = 256
GAIN = 1.5  # of each matrix: large enough that no layer fades beside the residual stream
SPREAD = 0.2  # of what is added to norms and biases, which begin as ones and zeros

# The same small size for every family, under whichever of these names its config has.
HIDDEN = dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size"), 32)
INNER = dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff"), 48)
LAYERS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2
)
HEADS = dict.fromkeys(
    (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "attention_heads",
        "decoder_attention_heads",
        "encoder_attention_heads",
    ),
    4,
)
POSITIONS = dict.fromkeys(
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), MAX_MODEL_LEN
)
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
SIZES: dict[str, Any] = {
    **HIDDEN, **INNER, **LAYERS, **HEADS, **POSITIONS, **EXPERTS, **LATENT,
    "vocab_size": VOCAB_SIZE, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8,
    "sliding_window": 16, "is_decoder": True, "tie_word_embeddings": False,
    "bos_token_id": NUM_BYTES, "eos_token_id": NUM_BYTES + 1, "pad_token_id": NUM_BYTES + 2,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 16, "embed_dim": 16, "out_hidden_size": 32, "vision_output_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32,
    "intermediate_size": 16, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2, "num_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
ONLY_WHERE_SET = {"sliding_window", "q_lora_rank"}  # None in a family's defaults means that it has none


def make_config(family: str, settings: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The family's config with its own defaults, cut down to the common sizes; `settings` come last.

    Where layers differ in type there are two of them, the first two types that the defaults have.
    """
    kind = CONFIG_MAPPING[family]
    default = kind()
    if "text_config" in kind.sub_configs:
        return _make_composite(default, dict(settings or {}))
    return kind(**{**small(default), **(settings or {})})


def _make_composite(default: PreTrainedConfig, settings: dict[str, Any]) -> PreTrainedConfig:
    """A model with towers: its text is as small as any, each tower still smaller; `settings` are the text's.

    What they have under a tower's name is the tower's; None leaves it as large as it is.
    """
    towers = {}
    for name in default.sub_configs:
        tower = getattr(default, name, None)
        changes = settings.pop(name, {})
        if name != "text_config" and tower is not None and changes is not None:
            towers[name] = {**small_tower(tower), "model_type": tower.model_type, **changes}
    whole = settings.pop("whole", {})
    text = default.text_config
    return type(default)(**towers, **whole, text_config={**small(text), **settings, "model_type": text.model_type})


def small_tower(default: PreTrainedConfig) -> dict[str, Any]:
    own = default.to_dict()
    return {name: size for name, size in TOWER.items() if name in own and _takes(default, name)}


def small(default: PreTrainedConfig) -> dict[str, Any]:
    own = default.to_dict()
    small = {name: size for name, size in SIZES.items() if name in own and _takes(default, name)}
    if own.get("is_encoder_decoder"):
        small.pop("is_decoder", None)
    small = {name: size for name, size in small.items() if name not in ONLY_WHERE_SET or own[name] is not None}
    types = list(dict.fromkeys(own.get("layer_types") or ()))
    if types and _takes(default, "layer_types"):
        small["layer_types"] = (types * 2)[:2]
    return small


def _takes(default: PreTrainedConfig, name: str) -> bool:
    renamed = default.attribute_map.get(name, name) != name
    derived = isinstance(getattr(type(default), name, None), property)
    return not renamed and not derived


def save_model(family: str, settings: Mapping[str, Any], folder: Path, *, seed: int = 0) -> None:
    """Write weights, config and tokenizer to `folder`."""
    config = make_config(family, settings)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    fill(model, zlib.crc32(f"{family} {seed}".encode()))
    model.generation_config = GenerationConfig(
        bos_token_id=SIZES["bos_token_id"], eos_token_id=SIZES["eos_token_id"], pad_token_id=SIZES["pad_token_id"]
    )
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def auto_class(config: PreTrainedConfig) -> Any:
    """By what transformers makes the whole model."""
    return AutoModelForMultimodalLM if "text_config" in config.sub_configs else AutoModelForCausalLM


def save_config(family: str, settings: Mapping[str, Any], folder: Path) -> None:
    """Write config and tokenizer alone, for what is refused before any weight is read."""
    make_config(family, settings).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


@torch.no_grad()
def fill(model: PreTrainedModel, seed: int) -> None:
    """Give every weight a random value, norms, biases and routers' corrections included.

    A family's own initialisation leaves norms at one, biases at zero and logits nearly flat; a mistake in any
    of them would not show.
    """
    generator = torch.Generator().manual_seed(seed)
    for tensor in _weights(model):
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() < 2:
            tensor += noise * SPREAD
        else:
            tensor.copy_(noise * GAIN / tensor.shape[-1] ** 0.5)


def _weights(model: nn.Module) -> list[Tensor]:
    saved = model.state_dict()
    buffers = [tensor for name, tensor in model.named_buffers() if name in saved]
    return [tensor for tensor in (*model.parameters(), *buffers) if tensor.is_floating_point()]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    begin, end, pad = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=pad, clean_up_tokenization_spaces=False
    )
