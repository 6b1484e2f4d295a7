"""Law: greedy tokens are those of transformers' `generate`, whatever is computed beside them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.conftest import ARCHITECTURES, DEMO
from tests.engine.harness import complete, config, make_engine, reference_greedy, request

pytestmark = pytest.mark.slow

MAX_TOKENS = 14


def make_prompts(vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of many lengths, some sharing a long beginning."""
    generator = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [generator.randrange(3, vocab_size) for _ in range(length)]

    shared = tokens(48)
    return [
        *(tokens(length) for length in (1, 2, 7, 33, 64, 100)),
        *(shared + tokens(length) for length in (1, 5, 20)),
        shared,
    ]


def check_parity(folder: Path, *, max_tokens: int = MAX_TOKENS, **limits: object) -> object:
    own = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="float32").eval()
    engine = make_engine(config(folder, **limits))
    prompts = make_prompts(engine.model.vocab_size, seed=7)
    expected = [reference_greedy(own, prompt, max_tokens) for prompt in prompts]
    for attempt in ("cold", "with prefix hits"):
        asked = [
            (request(f"{attempt}-{i}", max_tokens=max_tokens, n=2 if i % 3 == 0 else 1), prompt)
            for i, prompt in enumerate(prompts)
        ]
        outcomes = complete(engine, asked)
        for i, tokens in enumerate(expected):
            for sample in range(2 if i % 3 == 0 else 1):
                got = outcomes[f"{attempt}-{i}", sample].token_ids
                assert got == tokens, f"{attempt}: prompt {i} of {len(prompts[i])} tokens, sample {sample}"
    return engine


@pytest.mark.law("Company")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_generate_under_preemption(architecture: str, random_models: Path) -> None:
    from serve_app.engine.decoder.loading import load_model

    model = load_model(config(random_models / architecture))
    per_block = model.shape.bytes_per_token(model.dtype) * 16
    engine = check_parity(random_models / architecture, max_tokens=40, kv_cache_bytes=per_block * 9)
    assert engine.num_preemptions > 0, "the store was not small enough to matter"  # type: ignore[attr-defined]


def test_greedy_equals_generate_on_the_demo_model() -> None:
    check_parity(DEMO)


def test_greedy_equals_generate_when_torch_shares_its_work_out_to_threads() -> None:
    """Every other test has one thread, as the cluster file has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.get_num_threads() == 2
        check_parity(DEMO)
    finally:
        torch.set_num_threads(before)
