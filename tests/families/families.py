"""The tables: every family of decoders that transformers knows, and what the engine does with it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A family that does not load.

    family:    small
    reason:    the words of the refusal after the family's name
    by_config: it is refused before any weight is read
    needs:     a package with which it is served
    """

    family: Family
    reason: str
    by_config: bool = True
    needs: str | None = None


def family(name: str, variant: str = "", *, seed: int = 0, **settings: Any) -> Family:
    return Family(name=name, variant=variant, settings=settings, seed=seed)


def refused(name: str, reason: str, variant: str = "", **settings: Any) -> Refusal:
    return Refusal(family=family(name, variant, **settings), reason=reason)


def refused_by_probe(name: str, reason: str, variant: str = "", **settings: Any) -> Refusal:
    return Refusal(family=family(name, variant, **settings), reason=reason, by_config=False)


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **settings}


def rope_per_layer_type(**settings: Any) -> dict[str, Any]:
    return {kind: {**rope("default"), **settings} for kind in MIXED}


MIXED = ["sliding_attention", "full_attention"]
STRETCHED = {"original_max_position_embeddings": 64}
OF_ENCODER = {"pad_token_id": 1}  # their embeddings want it small
LONGROPE = rope("longrope", short_factor=[1.0, 1.1, 1.3, 1.6], long_factor=[1.0, 2.0, 3.0, 4.0])
LLAMA_4 = {
    "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "attention_chunk_size": 16, "floor_scale": 16,
    "no_rope_layers": [1, 0],
}  # fmt: skip
GEMMA_3N = {
    "vocab_size_per_layer_input": 259, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "intermediate_size": 48,
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": MIXED * 2,
}  # fmt: skip
GEMMA_4 = {"vocab_size_per_layer_input": 259, "hidden_size_per_layer_input": 8}
SECTIONED = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
EMU_3_EYES = {"codebook_size": 8, "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PHI_4_EARS = {
    "hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2,
    "ext_pw_out_channel": 16, "nemo_conv_channels": 16, "depthwise_separable_out_channel": 16,
}  # fmt: skip
LATENT_HEADS = {"num_key_value_heads": 4}  # keys and values come from a shared latent: as many as queries

SERVED = (
    family("apertus"),
    family("arcee"),
    family("aria_text"),
    family("axk1", **LATENT_HEADS),
    family("beam"),
    family("bert", seed=1),
    family("bert-generation"),
    family("biogpt"),
    family("bitnet"),
    family("camembert", **OF_ENCODER),
    family("cohere"),
    family("cohere", "query norm", use_qk_norm=True),
    family("cohere2"),
    family("cohere2_moe"),
    family("cohere_compass_text", rope_parameters=rope_per_layer_type(mrope_section=[2, 1, 1])),
    family("ctrl"),
    family("cwm"),
    family("data2vec-text", seed=1, **OF_ENCODER),
    family(
        "dbrx",
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    family("deepseek_v2", **LATENT_HEADS),
    family(
        "deepseek_v2",
        "groups of experts",
        n_routed_experts=8,
        n_group=2,
        topk_method="group_limited_greedy",
        **LATENT_HEADS,
    ),
    family("deepseek_v2", "whole queries", q_lora_rank=None, **LATENT_HEADS),
    family("deepseek_v3", **LATENT_HEADS),
    family("deepseek_v3", "groups of experts", n_routed_experts=8, n_group=4, topk_group=2, **LATENT_HEADS),
    family(
        "deepseek_v3",
        "rope yarn",
        rope_parameters=rope("yarn", mscale=1.0, mscale_all_dim=1.0, **STRETCHED),
        **LATENT_HEADS,
    ),
    family("dots1", n_shared_experts=1),
    family("electra", seed=1),
    family("ernie"),
    family("ernie4_5"),
    family("ernie4_5_moe"),
    family("ernie4_5_moe", "a dense layer", moe_layer_start_index=1),
    family("exaone4"),
    family("exaone_moe"),
    family("flex_olmo"),
    family("flint"),
    family("gemma"),
    family("gemma2", attn_logit_softcapping=1.0),
    family("gemma3_text"),
    family("gemma3n_text", "shared keys", **GEMMA_3N),
    family("gemma4_text", "heads of one size", global_head_dim=8, **GEMMA_4),
    family("gemma4_unified_text", "heads of one size", global_head_dim=8, **GEMMA_4),
    family("glm"),
    family("glm4"),
    family("glm4_moe"),
    family("glm4_moe", "query norm", use_qk_norm=True),
    family("glm4_moe_lite", **LATENT_HEADS),
    family("gpt-sw3"),
    family("gpt2"),
    family("gpt2", "scaled by layer", scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    family("gpt_bigcode"),
    family("gpt_bigcode", "a key head per query head", multi_query=False),
    family("gpt_neox"),
    family("gpt_neox", "serial", use_parallel_residual=False),
    family("gpt_oss"),
    family("granite"),
    family("granite_swa"),
    family("granitemoe"),
    family("granitemoe_swa"),
    family("granitemoehybrid", "attention only", layer_types=["full_attention"] * 2, mamba_n_heads=4, mamba_d_head=16),
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
    family("lfm2", "attention only", layer_types=["full_attention"] * 2),
    family("llama"),
    family("llama", "biases", attention_bias=True, mlp_bias=True),
    family("llama", "one key head", num_key_value_heads=1),
    family("llama", "rope linear", rope_parameters=rope("linear")),
    family(
        "llama", "rope llama3", rope_parameters=rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **STRETCHED)
    ),
    family("llama", "rope yarn", rope_parameters=rope("yarn", **STRETCHED)),
    family("llama", "tied", tie_word_embeddings=True),
    family(
        "longcat_flash", num_layers=2, ffn_hidden_size=48, expert_ffn_hidden_size=32, zero_expert_num=2, **LATENT_HEADS
    ),
    family("llama4_text", "chunks", attn_temperature_tuning=False, **LLAMA_4),
    family("llama4_text", "chunks and scaled queries", **LLAMA_4),
    family("mellum"),
    family("minicpm3", **LATENT_HEADS),
    family("minimax_m2"),
    family("minimax_m3_vl_text"),
    family("ministral"),
    family("ministral3"),
    family("ministral3", "scaled queries", rope_parameters=rope("yarn", llama_4_scaling_beta=0.5, **STRETCHED)),
    family("mistral"),
    family("mixtral"),
    family("mixtral", "sliding window", sliding_window=16),
    family("modernbert-decoder"),
    family("moshi", "a window as long as the context", sliding_window=256),
    family("nanochat"),
    family("nemotron"),
    family("olmo"),
    family("olmo", "clipped", clip_qkv=0.5),
    family("olmo2"),
    family("olmo3"),
    family("olmoe"),
    family("opt"),
    family("opt", "norm after", do_layer_norm_before=False),
    family("opt", "projected embeddings", word_embed_proj_dim=16),
    family("persimmon"),
    family("phi"),
    family("phi", "query norm", qk_layernorm=True),
    family("phi3"),
    family("phi3", "rope longrope", rope_parameters=LONGROPE, original_max_position_embeddings=256),
    family("phi3", "sliding window", sliding_window=16),
    family("phimoe"),
    family("qwen2"),
    family("qwen2", "sliding window", use_sliding_window=True, sliding_window=16, layer_types=MIXED),
    family("qwen2_moe"),
    family("qwen3"),
    family("qwen3", "sliding window", use_sliding_window=True, sliding_window=16, layer_types=MIXED),
    family("qwen3_moe"),
    family("qwen3_moe", "a dense layer", mlp_only_layers=[0], norm_topk_prob=True),
    family("roberta", **OF_ENCODER),
    family("roberta-prelayernorm", **OF_ENCODER),
    family(
        "roc_bert",
        seed=4,
        pronunciation_embed_dim=8,
        pronunciation_vocab_size=10,
        shape_embed_dim=8,
        shape_vocab_size=10,
        **OF_ENCODER,
    ),
    family("seed_oss"),
    family("smollm3", no_rope_layers=[1, 0]),
    family("solar_open"),
    family("stablelm"),
    family("stablelm", "parallel", use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True),
    family("starcoder2"),
    family("starcoder2", "sliding window", sliding_window=16),
    family("vaultgemma", attn_logit_softcapping=1.0),
    family("xlm-roberta", seed=1, **OF_ENCODER),
    family("xlm-roberta-xl", **OF_ENCODER),
    family("xmod", default_language="en_XX", **OF_ENCODER),
    family("youtu", **LATENT_HEADS),
    family("afmoe"),
    family("aria"),
    family("aya_vision"),
    family("cohere2_vision"),
    family("emu3", whole={"vocabulary_map": {"<image>": 5}}, vq_config=EMU_3_EYES),
    family("exaone4_5"),
    family("fuyu"),
    family("gemma3"),
    family("gemma4", global_head_dim=16, **GEMMA_4),
    family("gemma4_unified", global_head_dim=16, **GEMMA_4),
    family("glm4v", rope_parameters=SECTIONED),
    family("glm4v_moe", rope_parameters=SECTIONED),
    family("got_ocr2"),
    family("idefics2"),
    family("idefics3"),
    family("internvl"),
    family("kimi_k25", **LATENT_HEADS),
    family("lighton_ocr"),
    family("llama4", **LLAMA_4),
    family("llava"),
    family("llava_next"),
    family("llava_onevision"),
    family("mistral3"),
    family("mllama", num_hidden_layers=4, cross_attention_layers=[1, 3], vision_config={"max_num_tiles": 4}),
    family("moss_transcribe_diarize"),
    family("paddleocr_vl", rope_parameters=SECTIONED),
    family("phi4_multimodal", vision_config=EYES, audio_config=PHI_4_EARS),
    family("qwen2_5_vl", rope_parameters=SECTIONED),
    family("qwen2_vl", rope_parameters=SECTIONED),
    family("qwen3_vl"),
    family("qwen3_vl_moe"),
    family("smolvlm"),
    family("vipllava"),
    family("voxtral"),
    family("gemma4_text", "heads of two sizes", global_head_dim=16, **GEMMA_4),
    family("gemma4_unified_text", "heads of two sizes", global_head_dim=16, **GEMMA_4),
    family("llama", "rope dynamic", rope_parameters=rope("dynamic")),
    family("mimo_v2_flash"),
)

SMALL_STACK = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
}  # fmt: skip
BLT = {
    "patcher_config": {"vocab_size": 259, "hidden_size": 32, **SMALL_STACK},
    "encoder_config": {"vocab_size": 259, "hidden_size": 32, "hidden_size_global": 64, **SMALL_STACK},
    "decoder_config": {"vocab_size": 259, "hidden_size": 32, "hidden_size_global": 64, **SMALL_STACK},
    "global_config": {"hidden_size": 64, **SMALL_STACK},
    "encoder_hash_byte_group_vocab": 64,
}

TWICE = "layer 0 attends more than once per token"
OFF = "logits through the engine's attention are off by"
LINEAR = "layers of type linear_attention are not supported"
INDEXED = "layers of type indexed_attention are not supported"
CONVOLUTION = "layers of type conv are not supported"
COMPRESSED = "layers of type heavily_compressed_attention are not supported"
HYBRID_SLIDING = "layers of type hybrid_sliding are not supported"
HYBRID = "layers of type hybrid are not supported"
NOT_CAUSAL = "attention that is not causal is not supported"
ENCODER = "encoder-decoder models are not supported"
NO_LENGTH = "config.json has no max_position_embeddings"
OWN_MASKS = "the model makes attention masks of its own"
OTHER_WAY = "its attention does not go through AttentionInterface"

PACKAGES = "it needs the packages timm and pillow"
LATER_STATE = "a store for a layer's running state beside keys and values; the engine has none yet"
REMEDIES = {
    TWICE: "a store with several keys per layer and token; none is planned",
    OFF: "use the whole model's family with a service for encoder-decoder models",
    LINEAR: LATER_STATE,
    CONVOLUTION: LATER_STATE,
    HYBRID: LATER_STATE,
    HYBRID_SLIDING: LATER_STATE,
    INDEXED: "attention over chosen keys alone, with a store for the index; the engine has none yet",
    COMPRESSED: "a store for compressed keys; the engine has none yet",
    NOT_CAUSAL: "nothing: what was read would change with every token that is written",
    ENCODER: "a service for encoder-decoder models",
    NO_LENGTH: "add the length it was trained for to `config.json`, as `max_position_embeddings`; the probe decides",
    OWN_MASKS: "a class of transformers that leaves masks to attention",
    OTHER_WAY: "a class of transformers that calls attention by `AttentionInterface`",
    PACKAGES: "`pip install timm pillow`",
}

REFUSED = (
    refused("axk2", INDEXED),
    refused("bailing_hybrid", LINEAR),
    refused("bamba", LINEAR, mamba_n_heads=4, mamba_d_head=16),
    refused("bart", ENCODER),
    refused_by_probe("bert", NOT_CAUSAL, "encoder", is_decoder=False),
    refused_by_probe("big_bird", OTHER_WAY),
    refused("bigbird_pegasus", ENCODER),
    refused("blenderbot", ENCODER),
    refused("blenderbot-small", ENCODER),
    refused("bloom", NO_LENGTH),
    refused_by_probe("blt", TWICE, **BLT),
    refused_by_probe("codegen", OTHER_WAY, rotary_dim=4),
    refused("cpmant", NO_LENGTH),
    refused("deepseek_v32", INDEXED),
    refused("deepseek_v4", COMPRESSED),
    refused_by_probe("doge", OWN_MASKS),
    refused(
        "dots3_note", INDEXED, head_dim=16, vision_config=None, audio_config=None, hidden_size=5120, **LATENT_HEADS
    ),
    refused("dots3_note_text", INDEXED, **LATENT_HEADS),
    refused_by_probe("falcon", OTHER_WAY),
    refused("falcon_h1", HYBRID),
    refused("falcon_mamba", LINEAR),
    Refusal(family=family("gemma3n"), reason=PACKAGES, needs="timm"),
    refused_by_probe("git", OTHER_WAY, vision_config=EYES),
    refused("glm_moe_dsa", INDEXED),
    refused_by_probe("gpt_neo", OTHER_WAY, attention_types=[[["global", "local"], 1]], window_size=16),
    refused_by_probe("gpt_neox_japanese", OTHER_WAY),
    refused_by_probe("gptj", OTHER_WAY, rotary_dim=4),
    refused("granitemoehybrid", LINEAR, mamba_n_heads=4, mamba_d_head=16),
    refused_by_probe("hrm_text", TWICE),
    refused("hy_v4", INDEXED),
    refused("inkling2_text", HYBRID_SLIDING),
    refused("inkling_text", HYBRID_SLIDING),
    refused("jamba", LINEAR),
    refused("kimi_linear", LINEAR),
    refused("lfm2", CONVOLUTION, layer_types=["conv", "full_attention"]),
    refused("lfm2_moe", CONVOLUTION, layer_types=["conv", "full_attention"]),
    refused("lfm3", CONVOLUTION),
    refused("mamba", LINEAR),
    refused("mamba2", LINEAR, num_heads=4, head_dim=16),
    refused("marian", ENCODER),
    refused("mbart", ENCODER),
    refused_by_probe("megatron-bert", OTHER_WAY),
    refused("minimax", LINEAR),
    refused("mpt", NO_LENGTH),
    refused("musicgen", ENCODER),
    refused("musicgen_melody", ENCODER),
    refused("mvp", ENCODER),
    refused("nemotron_h", LINEAR),
    refused("olmo_hybrid", LINEAR),
    refused_by_probe("openai-gpt", OTHER_WAY),
    refused("pegasus", ENCODER),
    refused("plbart", ENCODER),
    refused("prophetnet", ENCODER),
    refused("qwen3_5", LINEAR),
    refused("qwen3_5_moe", LINEAR),
    refused("qwen3_5_moe_text", LINEAR),
    refused("qwen3_5_text", LINEAR),
    refused("qwen3_next", LINEAR),
    refused("qwen4_exp", LINEAR),
    refused("qwen4_exp_text", LINEAR),
    refused("recurrent_gemma", LINEAR),
    refused_by_probe(
        "reformer",
        OTHER_WAY,
        axial_pos_embds=False,
        attn_layers=["local"] * 2,
        feed_forward_size=48,
        attention_head_size=8,
    ),
    refused_by_probe("paligemma", NOT_CAUSAL),
    refused_by_probe("rembert", OTHER_WAY),
    refused_by_probe("roformer", OTHER_WAY),
    refused_by_probe("rwkv", OTHER_WAY, attention_hidden_size=32),
    refused_by_probe("trocr", OTHER_WAY),
    refused("whisper", ENCODER),
    refused_by_probe("xglm", OTHER_WAY, num_layers=2, **OF_ENCODER),
    refused_by_probe("xlm", OTHER_WAY, emb_dim=32, vocab_size=259),
    refused("xlstm", NO_LENGTH),
    refused("zamba", LINEAR, num_hidden_layers=3),
    refused("zamba2", LINEAR, num_hidden_layers=54),
    refused("zaya", HYBRID, num_experts_per_tok=1),
    *(
        refused_by_probe(name, OFF, "decoder alone")  # it counts positions by itself
        for name in ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart")
    ),
    refused_by_probe("diffllama", TWICE),
    refused("xlnet", NO_LENGTH, d_inner=48),
)

NOT_ALONE = {
    "gemma4_assistant": "drafts for another model, whose keys and values it reads",
    "gemma4_unified_assistant": "drafts for another model, whose keys and values it reads",
}
