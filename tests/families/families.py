"""The tables: every family that transformers can generate text with, and what the engine does with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family, small.

    name:     transformers' `model_type`
    variant:  what is special where a family is here more than once
    settings: of its config, beyond the common sizes
    seed:     of its weights; another one where the model's own two likeliest tokens are too near to tell
    """

    name: str
    variant: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def label(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name


def family(name: str, variant: str = "", *, seed: int = 0, **settings: Any) -> Family:
    return Family(name=name, variant=variant, settings=settings, seed=seed)


SERVED = (
    family("apertus"),
    family("arcee"),
    family("aria_text"),
    family("axk1", num_key_value_heads=4),
    family("beam"),
    family("biogpt"),
    family("bitnet"),
    family("cohere"),
    family("cohere2"),
    family("cohere2_moe"),
    family("ctrl"),
    family("cwm"),
    family("deepseek_v2", num_key_value_heads=4),
    family("deepseek_v3", num_key_value_heads=4),
    family("dots1", n_shared_experts=1),
    family("ernie4_5"),
    family("ernie4_5_moe"),
    family("exaone4"),
    family("exaone_moe"),
    family("flex_olmo"),
    family("flint"),
    family("gemma"),
    family("gemma2"),
    family("gemma3_text"),
    family("glm"),
    family("glm4"),
    family("glm4_moe"),
    family("glm4_moe_lite", num_key_value_heads=4),
    family("gpt-sw3"),
    family("gpt2"),
    family("gpt_bigcode"),
    family("gpt_neox"),
    family("gpt_oss"),
    family("granite"),
    family("granite_swa"),
    family("granitemoe"),
    family("granitemoe_swa"),
    family("granitemoeshared"),
    family("helium"),
    family("hunyuan_v1_dense"),
    family("hunyuan_v1_moe"),
    family("hy_v3"),
    family("hyperclovax"),
    family("internlm3"),
    family("iquestcoder"),
    family("jais2"),
    family("jetmoe"),
    family("kolibri1"),
    family("laguna"),
    family("llama"),
    family("mellum"),
    family("minicpm3", num_key_value_heads=4),
    family("minimax_m2"),
    family("minimax_m3_vl_text"),
    family("ministral"),
    family("ministral3"),
    family("mistral"),
    family("mixtral"),
    family("modernbert-decoder"),
    family("nanochat"),
    family("nemotron"),
    family("olmo"),
    family("olmo2"),
    family("olmo3"),
    family("olmoe"),
    family("opt"),
    family("persimmon"),
    family("phi"),
    family("phi3"),
    family("phimoe"),
    family("qwen2"),
    family("qwen2_moe"),
    family("qwen3"),
    family("qwen3_moe"),
    family("seed_oss"),
    family("smollm3", no_rope_layers=[1, 0]),
    family("solar_open"),
    family("stablelm"),
    family("starcoder2"),
    family("vaultgemma"),
    family("youtu", num_key_value_heads=4),
)
