"""Law: greedy tokens are those of transformers' `generate`, in every family that is served."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from serve_app.engine.decoder.loading import rehearse
from serve_app.engine.decoder.weights import held_bytes
from tests.engine.harness import complete, config, make_engine, request
from tests.families.families import SERVED, Family
from tests.families.making import NUM_BYTES, auto_class

pytestmark = pytest.mark.slow

MAX_TOKENS = 6
MIN_GAP = 1e-4  # between the two likeliest logits: many times what two orders of the same sums differ by
NUM_SAMPLES = {1: 2, 4: 2}  # by prompt; 1 where it is not named
STAND_FOR_ALL = {"llama", "gpt2", "gemma3_text", "deepseek_v3", "qwen3_moe"}
"""Rotated and learned positions, windows, latents, experts: one family of each kind, which are not marked slow."""
CASES = [pytest.param(each, marks=() if each.label in STAND_FOR_ALL else pytest.mark.slow) for each in SERVED]


@pytest.mark.law("Company")
@pytest.mark.parametrize("family", CASES, ids=lambda family: family.label)
def test_greedy_equals_generate_with_chunks_hits_and_forks(
    family: Family, model_folder: Callable[[Family], Path]
) -> None:
    folder = model_folder(family)
    own = whole_model(folder)
    engine = make_engine(config(folder))
    assert rehearse(config(folder)).num_bytes == held_bytes(engine.model.module)
    prompts = make_prompts(seed=7)
    expected = [generate(own, prompt) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts), "the model says the same whatever it is asked"
    for attempt, num_cached in (("cold", 0), ("with prefix hits", 96)):
        asked = [
            (request(f"{attempt}-{i}", max_tokens=MAX_TOKENS, n=NUM_SAMPLES.get(i, 1)), prompt)
            for i, prompt in enumerate(prompts)
        ]
        outcomes = complete(engine, asked)
        for i, tokens in enumerate(expected):
            for sample in range(NUM_SAMPLES.get(i, 1)):
                got = outcomes[f"{attempt}-{i}", sample].token_ids
                assert got == tokens, f"{attempt}: prompt {i} of {len(prompts[i])} tokens, sample {sample}"
        longest = outcomes[f"{attempt}-3", 0].deltas[0].prompt
        assert longest is not None
        assert longest.num_cached_tokens == num_cached


def whole_model(folder: Path) -> PreTrainedModel:
    """As transformers loads it, towers included."""
    kind = auto_class(AutoConfig.from_pretrained(folder))
    model: PreTrainedModel = kind.from_pretrained(folder, local_files_only=True, dtype="float32")
    return model.eval()


def make_prompts(seed: int) -> list[list[int]]:
    """Prompts from one token to several times a step's budget, some sharing a long beginning."""
    generator = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [generator.randrange(NUM_BYTES) for _ in range(length)]

    shared = tokens(48)
    return [*(tokens(length) for length in (1, 7, 33, 100)), shared + tokens(5), shared]


@torch.inference_mode()
def generate(own: PreTrainedModel, prompt: list[int]) -> list[int]:
    """transformers' greedy continuation, the end token included where it comes."""
    ids = torch.tensor([prompt])
    out = own.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    for logits in out.logits:
        first, second = torch.topk(logits[0], 2).values.tolist()
        assert first - second > MIN_GAP, "the model's own choice is a matter of rounding; give it another seed"
    return [int(token) for token in out.sequences[0, len(prompt) :]]
