"""The engine over Triton's kernels, whole: the same tokens as `generate`, whatever is computed beside them."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.conftest import DEMO
from tests.engine.harness import complete, config, make_engine, reference_greedy, request

pytest.importorskip("triton", reason="its kernels can be neither compiled nor interpreted")

pytestmark = pytest.mark.slow


def test_greedy_equals_generate(device: torch.device) -> None:
    settings = config(DEMO, device=device.type, kernels="triton", block_size=8)
    engine = make_engine(settings)
    assert engine.model.kernels == "triton"
    own = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype="float32").eval()
    prompts = [[40 + i] * (3 + 17 * i) for i in range(3)]
    outcomes = complete(engine, [(request(f"{i}", max_tokens=4), prompt) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert outcomes[f"{i}", 0].token_ids == reference_greedy(own, prompt, 4)
