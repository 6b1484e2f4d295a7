"""Builds the loop from a model of transformers: its modules, in the order in which the loop computes them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from serve_app.engine.decoder.family import FAMILIES, Family
from serve_app.engine.decoder.layer import Attention, Heads, Layer, Mlp, Product, Rotation, activation_of
from serve_app.engine.decoder.loop import Adapt, DecoderLoop, Rotary
from serve_app.engine.decoder.norm import Norm, norm_of
from serve_app.engine.decoder.text_part import text_config
from serve_app.engine.kv.plan import Scoring
from serve_app.engine.kv.shape import KeyValueShape
from serve_app.engine.tensor_parallel.collectives import Collectives

Scorings: TypeAlias = Mapping[int, Scoring]
"""How each layer weighs keys, by its number."""

INPUTS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
MLP_INPUTS = (("gate_proj", "up_proj"), ("gate_up_proj",))
FIXED = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotations whose frequencies depend on nothing of a step."""
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
KNOWN = {
    "layer": {"self_attn", "mlp", *NORMS},
    "attention": {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"},
    "mlp": {"gate_proj", "up_proj", "gate_up_proj", "down_proj"},
    "decoder": {"embed_tokens", "layers", "norm", "rotary_emb"},
}
"""Whose parameters the loop knows what to do with."""


class NotDescribed(ValueError):
    """A model has something that the loop does not know."""


def family_of(module: PreTrainedModel) -> Family | None:
    """The family of a model that the loop is tried on."""
    return FAMILIES.get(str(text_config(module.config).model_type))


def build_loop(
    module: PreTrainedModel,
    shape: KeyValueShape,
    scorings: Scorings,
    *,
    sums: Collectives | None = None,
    adapt: Adapt | None = None,
) -> DecoderLoop:
    """The loop over a model's modules, those that adapters are wrapped around included. Raises NotDescribed.

    sums:  of a divided model
    adapt: of a model that has adapters
    """
    family, decoder = family_of(module), module.get_decoder()
    if family is None:
        raise NotDescribed(f"{text_config(module.config).model_type} is no family of the loop's")
    if shape.places or shape.readers:
        raise NotDescribed("layers read what others wrote")
    _check_known(decoder, "decoder")
    config: Any = decoder.config
    found: Any = decoder.layers
    layers = [_layer(each, number, decoder, shape, scorings[number], family) for number, each in enumerate(found)]
    norm = norm_of(decoder.norm, offset=family.norm_offset)
    head: Any = module.get_output_embeddings()
    if norm is None or head is None:
        raise NotDescribed("its last norm or its head is of another kind")
    return DecoderLoop(
        layers if sums is None else [layer.summed(sums) for layer in layers],
        embed=module.get_input_embeddings(),
        rotary=_rotary(decoder.rotary_emb),
        norm=norm,
        head=head,
        embedding_factor=float(getattr(decoder, "embedding_multiplier", 1.0)),
        logits_divisor=float(getattr(config, "logits_scaling", 1.0)),
        softcap=getattr(config, "final_logit_softcapping", None),
        adapt=adapt,
    )


def _layer(layer: Any, number: int, decoder: Any, shape: KeyValueShape, scoring: Scoring, family: Family) -> Layer:
    _check_known(layer, "layer")
    norms = _norms(layer, family)
    return Layer(
        attention=_attention(layer.self_attn, number, decoder, shape, scoring, family),
        mlp=_mlp(layer.mlp),
        before_attention=norms[0],
        after_attention=norms[1],
        before_mlp=norms[2],
        after_mlp=norms[3],
        residual=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _norms(layer: Any, family: Family) -> tuple[Norm | None, Norm | None, Norm | None, Norm | None]:
    """Before and after attention, before and after the MLP: by the names that transformers has for them."""
    has = {name for name in NORMS if hasattr(layer, name)}
    found = {name: norm_of(getattr(layer, name), offset=family.norm_offset) for name in has}
    if None in found.values():
        raise NotDescribed("its norms are of another kind")
    first, second, third, fourth = NORMS
    if has == {first, second}:
        return found[first], None, found[second], None
    if has == {second, fourth}:
        return None, found[second], None, found[fourth]
    if has == set(NORMS):
        return found[first], found[second], found[third], found[fourth]
    raise NotDescribed(f"its layers have the norms {sorted(has)}")


def _attention(
    module: Any, number: int, decoder: Any, shape: KeyValueShape, scoring: Scoring, family: Family
) -> Attention:
    _check_known(module, "attention")
    kept, inputs = shape.layers[number], _modules(module, INPUTS)
    if kept.key_dim != kept.value_dim:
        raise NotDescribed("keys and values differ in size")
    width = sum(int(each.out_features) for each in map(_base, inputs)) // kept.key_dim
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (norm_of(each, offset=family.norm_offset) for each in norms)
    if (query_norm is None) != (norms[0] is None) or (key_norm is None) != (query_norm is None):
        raise NotDescribed("its norms of queries and keys are of another kind")
    return Attention(
        heads=Heads(num_queries=width - 2 * kept.heads, num_keys=kept.heads, dim=kept.key_dim),
        inputs=Product(inputs),
        output=Product([module.o_proj]),
        query_norm=query_norm,
        key_norm=key_norm,
        norms_rows=norms[0] is not None and norms[0].weight.shape[0] != kept.key_dim,
        clip=getattr(decoder.config, "clip_qkv", None),
        rope=_rope_kind(module, number, decoder),
        scoring=scoring,
    )


def _rope_kind(module: Any, number: int, decoder: Any) -> str | None:
    if not getattr(module, "use_rope", True):
        return None
    return str(decoder.config.layer_types[number]) if _is_by_type(decoder.rotary_emb) else ""


def _mlp(module: Any) -> Mlp:
    _check_known(module, "mlp")
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    return Mlp(
        inputs=Product(_modules(module, MLP_INPUTS)),
        activation=activation_of(activation),
        output=Product([module.down_proj]),
    )


def _rotary(module: Any) -> Rotary:
    """The model's own rotary embedding; some have one for each type of layer, and most fixed frequencies."""
    if _is_by_type(module):
        return lambda x, positions, kind: _rotation(*module(x, positions[None], kind))
    if getattr(module, "rope_type", None) not in FIXED:
        return lambda x, positions, _: _rotation(*module(x, positions[None]))

    def rotate(x: Tensor, positions: Tensor, _: str) -> Rotation:
        angles = positions.float()[:, None] * module.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if module.attention_scaling != 1.0:
            cos, sin = cos * module.attention_scaling, sin * module.attention_scaling
        return Rotation(cos=_twice(cos, cos).to(x.dtype), sin=_twice(-sin, sin).to(x.dtype))

    return rotate


def _rotation(cos: Tensor, sin: Tensor) -> Rotation:
    """cos, sin: [1, tokens, rotated], as transformers has them"""
    first, second = sin[0].chunk(2, dim=-1)
    return Rotation(cos=cos[0, :, None], sin=_twice(-first, second))


def _twice(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second], dim=-1)[:, None]


def _is_by_type(rotary: Any) -> bool:
    return "layer_type" in inspect.signature(rotary.forward).parameters


def _modules(parent: nn.Module, choices: Sequence[tuple[str, ...]]) -> list[nn.Module]:
    """Those of the first choice that the parent has all of."""
    for names in choices:
        if all(hasattr(parent, name) for name in names):
            return [getattr(parent, name) for name in names]
    raise NotDescribed(f"{type(parent).__name__} has none of {choices}")


def _base(module: nn.Module) -> Any:
    """The linear itself, where adapters may be wrapped around it."""
    return getattr(module, "base", module)


def _check_known(module: nn.Module, kind: str) -> None:
    strange = [name for name, child in module.named_children() if name not in KNOWN[kind] and _holds(child)]
    if strange or any(True for _ in module.parameters(recurse=False)):
        raise NotDescribed(f"{type(module).__name__} has {strange or 'parameters of its own'}")


def _holds(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())
