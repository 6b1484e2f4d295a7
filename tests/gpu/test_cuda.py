"""The engine on a GPU, where there is one: the same tokens as `generate` on the CPU, in float32."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.conftest import DEMO
from tests.engine.harness import complete, config, make_engine, reference_greedy, request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def test_greedy_on_cuda_equals_generate_on_the_cpu() -> None:
    own = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype="float32").eval()
    engine = make_engine(config(DEMO, device="cuda"))
    prompts = [[40 + i] * (3 + 9 * i) for i in range(6)]
    outcomes = complete(engine, [(request(f"{i}", n=2), prompt) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        expected = reference_greedy(own, prompt, 12)
        assert [outcomes[f"{i}", sample].token_ids for sample in (0, 1)] == [expected, expected]
