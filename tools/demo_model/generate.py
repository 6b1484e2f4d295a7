"""Loads the stored model and completes prompts greedily, many at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

MAX_NEW_TOKENS = 320
ROWS_AT_ONCE = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a model wrote after a prompt, without the end token; `is_ended` says whether it wrote one."""

    text: str
    is_ended: bool


def load_model(folder: Path) -> Any:
    """Load the weights of a folder as float32; a `PreTrainedModel`, whose methods bear no types."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(folder))


def complete(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[Completion]:
    """Complete every prompt with the likeliest tokens, up to an end token or `max_new_tokens`."""
    completions: list[Completion] = []
    for start in range(0, len(prompts), ROWS_AT_ONCE):
        rows = tokenizer(prompts[start : start + ROWS_AT_ONCE], return_tensors="pt", padding=True, padding_side="left")
        with torch.inference_mode():
            written = model.generate(
                input_ids=rows["input_ids"],
                attention_mask=rows["attention_mask"],
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
        num_given = rows["input_ids"].shape[1]
        completions += [_completion(row[num_given:].tolist(), model, tokenizer) for row in written]
    return completions


def _completion(tokens: list[int], model: Any, tokenizer: PreTrainedTokenizerFast) -> Completion:
    ends = set(model.generation_config.eos_token_id)
    num_kept = next((place for place, token in enumerate(tokens) if token in ends), None)
    return Completion(text=str(tokenizer.decode(tokens[:num_kept])), is_ended=num_kept is not None)
