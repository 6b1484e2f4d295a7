"""Sequences that share a long prefix go on as each would alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from serve_app.kernels.cpu.attention import STRETCH
from serve_app.kernels.openmp import libgomp
from tests.engine.conftest import DEMO
from tests.engine.harness import complete, config, make_engine, reference_greedy, request
from tests.families.making import save_model

pytestmark = pytest.mark.skipif(libgomp() is None, reason="needs torch's libgomp")

COMMON = 2 * STRETCH + 80


def test_sequences_on_one_prefix_go_on_as_they_do_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    save_model("qwen2", {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 2048}, folder)
    prefix = [(7 * at) % 250 for at in range(COMMON)]
    asked = [
        (request(f"r{number}", max_tokens=6 + 9 * number), [*prefix, number, 2 * number + 1, 5]) for number in range(4)
    ]
    settings = config(folder, dtype="bfloat16", max_num_sequences=4, max_model_len=2048, kv_cache_bytes=1 << 26)
    together = complete(make_engine(settings, eos_token_ids=frozenset()), asked)
    alone = {}
    for each in asked:
        alone |= complete(make_engine(settings, eos_token_ids=frozenset()), [each])
    assert {name: each.token_ids for name, each in together.items()} == {
        name: each.token_ids for name, each in alone.items()
    }


@pytest.mark.law("Company")
def test_completions_on_a_long_prefix_share_it_and_are_those_of_generate() -> None:
    prefix = [700 + (7 * i) % 50 for i in range(800)]  # longer than a stretch of the kernel; some texts end early
    prompts = [[*prefix, 701 + i, *range(720, 720 + i)] for i in range(14)]
    engine = make_engine(config(DEMO, max_num_sequences=14, max_batch_tokens=200))  # a copy for each is made in a step
    complete(engine, [(request("first", max_tokens=1), prefix)])
    outcomes = complete(engine, [(request(f"{i}", max_tokens=20), prompt) for i, prompt in enumerate(prompts)])
    assert engine.load.num_prefix_hit_tokens >= 14 * 784
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    for i, prompt in enumerate(prompts):
        assert outcomes[f"{i}", 0].token_ids == reference_greedy(plain, prompt, 20)
