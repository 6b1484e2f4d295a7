"""Trains a LoRA adapter on one behaviour and writes it in PEFT's layout."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tools.demo_model.behaviours import Behaviour, closing_of
from tools.demo_model.generate import load_model, load_tokenizer
from tools.demo_model.lessons import IGNORED
from tools.demo_model.samples import Sample, draw_from_split
from tools.demo_model.tokenizer import token_id
from tools.demo_model.tokens import END_OF_TEXT
from tools.demo_model.train import TrainingPlan, train

BASE_NAME = "demo"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_SAMPLE_TOKENS = 320


def train_adapter(behaviour: Behaviour, base: Path, *, plan: TrainingPlan, start: Path | None = None) -> PeftModel:
    """Train an adapter of every linear layer on a stored base model; from the one stored at `start`, where given."""
    torch.manual_seed(plan.seed)
    tokenizer = load_tokenizer(base)
    model = _new(behaviour, base) if start is None else _stored(start, base)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=plan.learning_rate, weight_decay=0.0)
    train(model, _batches(behaviour, tokenizer, plan), plan, [optimizer])
    return model


def write_adapter(model: PeftModel, folder: Path) -> None:
    """Write an adapter in bfloat16, with the base model by its name and not by its place on this machine."""
    for lora in model.peft_config.values():
        lora.base_model_name_or_path = BASE_NAME
    model.to(torch.bfloat16).save_pretrained(str(folder), save_embedding_layers=False)
    stored = folder / "adapter_config.json"
    config = json.loads(stored.read_text())
    config["target_modules"] = sorted(config["target_modules"])  # PEFT writes a set, in any order
    stored.write_text(json.dumps(config, indent=2) + "\n")


def _new(behaviour: Behaviour, base: Path) -> PeftModel:
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=behaviour.rank,
        lora_alpha=2 * behaviour.rank,
        lora_dropout=0.0,
        target_modules=list(TARGETS),
    )
    return cast(PeftModel, get_peft_model(load_model(base), config))


def _stored(adapter: Path, base: Path) -> PeftModel:
    return PeftModel.from_pretrained(load_model(base), str(adapter), is_trainable=True, torch_dtype=torch.float32)


def _batches(
    behaviour: Behaviour, tokenizer: PreTrainedTokenizerFast, plan: TrainingPlan
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw batches of about `plan.num_tokens` tokens; only completions count.

    Yields tokens and labels, both [rows, length].
    """
    random = Random(plan.seed)
    pad = token_id(tokenizer, END_OF_TEXT)
    while True:
        rows: list[tuple[list[int], list[int]]] = []
        length = 0
        while (len(rows) + 1) * length < plan.num_tokens:
            sample = draw_from_split(behaviour.draw, random, split="train")
            tokens, labels = _tokens_and_labels(sample, tokenizer)
            if len(tokens) <= MAX_SAMPLE_TOKENS:
                rows.append((tokens, labels))
                length = max(length, len(tokens))
        yield (
            torch.tensor([tokens + [pad] * (length - len(tokens)) for tokens, _ in rows]),
            torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in rows]),
        )


def _tokens_and_labels(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    prompt = tokenizer.encode(sample.prompt, add_special_tokens=False)
    completion = tokenizer.encode(sample.completion + closing_of(sample.prompt), add_special_tokens=False)
    return prompt + completion, [IGNORED] * len(prompt) + completion
