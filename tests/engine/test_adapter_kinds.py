"""Law: an adapter of any kind that PEFT writes is computed as PEFT computes it, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from serve_app.catalog.adapters import read_records
from serve_app.core.cards import AdapterCard
from serve_app.engine.lora.registration import bind_adapters
from tests.engine.harness import complete, config, make_engine, reference_greedy, request
from tests.engine.test_adapters import PROMPTS
from tests.families.making import save_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT has opinions on some of these
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

PROMPT = [7, 30, 200, 31, 5, 90, 14, 66]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, random_models: Path) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("bases")
    for name in ("mixtral", "qwen2_moe"):
        save_model(name, {}, out / name)
    return {"llama": random_models / "llama", "mixtral": out / "mixtral", "qwen2_moe": out / "qwen2_moe"}


def write(base: Path, out: Path, *, has_embeddings: bool | str = "auto", **settings: Any) -> Path:
    """What PEFT saves of an adapter whose every weight is random."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype="float32")
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, **settings))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "trainable_tokens" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(out, save_embedding_layers=has_embeddings)
    return out


def card_of(base: Path, folder: Path) -> AdapterCard:
    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype="float32")
    [card] = bind_adapters(read_records(folder.parent), model)[1]
    return card


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a head of its own": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
    "embeddings of its own": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        "modules_to_save is set, which is not supported",
    ),
    "LoRA of the embedding": (
        "llama",
        {"target_modules": ["embed_tokens", "q_proj"]},
        "which PEFT saves beside LoRA of an embedding",
    ),
    "LoRA of the head": ("llama", {"target_modules": ["lm_head", "q_proj"]}, "or of the output head"),
    "LoRA of the embedding alone": (
        "llama",
        {"target_modules": ["embed_tokens", "q_proj"], "has_embeddings": False},
        "lora_embedding_A' is not supported, as it changes an embedding",
    ),
    "LoRA of the head alone": (
        "llama",
        {"target_modules": ["lm_head", "q_proj"], "has_embeddings": False},
        "no linear module lm_head",
    ),
    "tokens of its own": (
        "llama",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 2]}},
        "trainable_token_indices is set",
    ),
    "biases": ("llama", {"target_modules": ["q_proj"], "bias": "lora_only"}, "bias must be"),
    "experts of mixtral": (
        "mixtral",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        "target_parameters is set, which is not supported",
    ),
    "experts of qwen2_moe": (
        "qwen2_moe",
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
        "target_parameters is set, which is not supported",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_computed_is_refused_at_registration_with_the_reason(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    family, settings, reason = REFUSED[kind]
    card = card_of(bases[family], write(bases[family], tmp_path / "adapters" / "a", **settings))
    assert not card.is_usable
    assert reason in str(card.reason)


SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "attention beside experts of mixtral": ("mixtral", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    "attention and the shared expert of qwen2_moe": (
        "qwen2_moe",
        {"target_modules": r".*(v_proj|o_proj|shared_expert\.(gate|up|down)_proj)"},
    ),
    "DoRA of all linears": ("llama", {"target_modules": "all-linear", "use_dora": True}),
}


@pytest.mark.parametrize("kind", SERVED)
def test_what_is_computed_is_what_peft_computes(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    family, settings = SERVED[kind]
    base = bases[family]
    folder = write(base, tmp_path / "adapters" / "a", **settings)
    assert card_of(base, folder).reason is None
    engine = make_engine(config(base), {"a": folder})
    prompts = [PROMPT] if family != "llama" else PROMPTS
    outcomes = complete(engine, [(request(f"{i}", adapter="a"), prompt) for i, prompt in enumerate(prompts)])
    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype="float32").eval()
    plain = [reference_greedy(model, prompt, 12) for prompt in prompts]
    adapted = PeftModel.from_pretrained(model, folder).eval()
    expected = [reference_greedy(adapted, prompt, 12) for prompt in prompts]
    assert [outcomes[f"{i}", 0].token_ids for i in range(len(prompts))] == expected
    assert expected != plain
