"""Makes what the workloads are measured on, from nothing: models of random weights, adapters, words for prompts.

    python -m benchmarks.checkpoints scratch/bench

writes bench-0.5b (the shape of Qwen2.5-0.5B), bench-tiny (4 layers of 256), adapters/lora-0 to lora-7 of bench-0.5b
(rank 16, on every linear layer), words.txt, and cluster.yaml, which serves all of them: `serve_app up` that file. Every
other server can read the folders, too. The same numbers on every machine; what is there already is not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.random_models import SHAPES, SPECIAL, make_model
from benchmarks.service import write_cluster_file
from tests.engine.adapter_files import save_adapter

MODELS = {"bench-0.5b": "random-0.5b", "bench-tiny": "random-small"}
ADAPTED = "bench-0.5b"
NUM_ADAPTERS = 8
RANK = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALPHA = 1
"""A whole number, as some servers want it; by the rank, a factor of a sixteenth, so that texts differ and go on."""
PORT = 8000
CONSONANTS = "bcdfghjklmnprstvwxz"
VOWELS = "aeiou"
SPACE = "\u0120"  # as byte-level tokenizers write it
WEIGHTS = "model.safetensors"


def words() -> list[str]:
    """Words of three letters; with a space before it, each is one token of `word_tokenizer`."""
    return ["".join(letters) for letters in itertools.product(CONSONANTS, VOWELS, CONSONANTS)]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and the words, which are put together letter by letter from their space on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: dict[tuple[str, str], str] = {}
    for length in range(1, 4):
        for word in words():
            left, right = SPACE + word[: length - 1], word[length - 1]
            merges[left, right] = left + right
    vocab = {piece: number for number, piece in enumerate([SPECIAL, *alphabet, *merges.values()])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL)


def make_all(folder: Path) -> None:
    """All that is not there yet, each model in a process of its own, so that its memory is given back."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "words.txt").write_text("\n".join(words()) + "\n", encoding="utf-8")
    for name, shape in MODELS.items():
        if not (folder / name / WEIGHTS).exists():
            process = multiprocessing.get_context("spawn").Process(target=make_worded, args=(shape, folder / name))
            process.start()
            process.join()
            assert process.exitcode == 0, f"{name} could not be made"
    make_adapters(MODELS[ADAPTED], folder / "adapters")
    write_cluster_file(folder / "cluster.yaml", PORT, served(folder))


def make_worded(shape: str, folder: Path) -> None:
    make_model(shape, folder, word_tokenizer())


def make_adapters(shape: str, folder: Path) -> None:
    """Both factors drawn, so that each adapter says something else than its base."""
    with torch.device("meta"):  # the shapes alone are looked at
        module = AutoModelForCausalLM.from_config(SHAPES[shape]())
    for number in range(NUM_ADAPTERS):
        save_random_adapter(folder / f"lora-{number}", module, rank=RANK, seed=1000 + number)


def save_random_adapter(folder: Path, module: torch.nn.Module, *, rank: int, seed: int) -> Path:
    """With what peft writes in its settings, so that every server reads it."""
    save_adapter(folder, module, rank=rank, seed=seed, targets=TARGETS, dtype=torch.bfloat16)
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": ALPHA, "bias": "none",
        "target_modules": list(TARGETS), "base_model_name_or_path": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
    return folder


def served(folder: Path) -> tuple[dict[str, Any], ...]:
    """The `args` of the models: all cores for the one that computes, room for 32 sequences of each workload."""
    common = {"dtype": "auto", "threads": os.cpu_count() or 1, "max_num_sequences": 32}
    base = {"name": ADAPTED, "path": str(folder.resolve() / ADAPTED), "kv_cache_bytes": 2 << 30}
    tiny = {"name": "bench-tiny", "path": str(folder.resolve() / "bench-tiny"), "kv_cache_bytes": 1 << 29}
    own = {"adapters": str(folder.resolve() / "adapters"), "max_adapters": NUM_ADAPTERS, "max_batch_tokens": 1024}
    return (base | own | common, tiny | common)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    make_all(parser.parse_args().folder)


if __name__ == "__main__":
    main()
