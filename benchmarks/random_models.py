"""Makes models of well-known shapes with random weights, for measurements that need no meaning."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

SPECIAL = "<|end|>"


def tiny() -> PreTrainedConfig:
    """Little to compute in each layer, and the vocabulary and context of large models."""
    return Qwen2Config(
        vocab_size=151936, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip


def small() -> PreTrainedConfig:
    """So little to compute that what is left is the server's own work."""
    return Qwen2Config(
        vocab_size=32768, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip


def half_billion() -> PreTrainedConfig:
    """The shape of Qwen2.5-0.5B."""
    return Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip


def one_billion() -> PreTrainedConfig:
    """The shape of Llama-3.2-1B."""
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, tie_word_embeddings=True, eos_token_id=0,
        bos_token_id=0, rope_parameters=rope,
    )  # fmt: skip


def one_and_a_half_billion() -> PreTrainedConfig:
    """The shape of Qwen2.5-1.5B."""
    return Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip


def eight_billion() -> PreTrainedConfig:
    """The shape of Llama-3.1-8B, with its plain rotation."""
    return LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, tie_word_embeddings=False, eos_token_id=0,
        bos_token_id=0,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "random-tiny": tiny,
    "random-small": small,
    "random-0.5b": half_billion,
    "random-1b": one_billion,
    "random-1.5b": one_and_a_half_billion,
    "random-8b": eight_billion,
}


def model_folder(name: str, scratch: Path) -> Path:
    """The folder of a model: `name` itself, or a random one of the shape of that name, made below `scratch`."""
    if name not in SHAPES:
        return Path(name)
    folder = scratch / name
    process = multiprocessing.get_context("spawn").Process(target=make_model, args=(name, folder))
    process.start()  # so that the memory is given back
    process.join()
    assert process.exitcode == 0, f"{name} could not be made"
    return folder


def make_model(name: str, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """Random weights in bfloat16, and a byte tokenizer unless another is given.

    Embeddings of all but printable characters are zeros, and so are their logits: what is greedily chosen has a text.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    module = AutoModelForCausalLM.from_config(SHAPES[name]())
    tokenizer = tokenizer or _byte_tokenizer()
    is_shown = torch.zeros(module.config.vocab_size, dtype=torch.bool)
    for token_id in range(1, len(tokenizer)):
        text = tokenizer.decode([token_id])
        is_shown[token_id] = text.isascii() and text.isprintable()
    with torch.no_grad():
        module.get_input_embeddings().weight[~is_shown] = 0
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([SPECIAL, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL)
