"""Computes llama-like decoders in one loop: a step in, logits out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from serve_app.engine.decoder.layer import (
    Attention,
    Change,
    Heads,
    Layer,
    Mlp,
    Norm,
    Product,
    Rotation,
    activation_of,
    norm_of,
)
from serve_app.engine.decoder.step import Step
from serve_app.engine.decoder.text_part import FAMILIES, Family, text_config
from serve_app.engine.kv.storage import KeyValueShape
from serve_app.engine.lora.plan import Mix
from serve_app.engine.tensor_parallel.collectives import Collectives
from serve_app.kernels.forms import Scoring

Adapt: TypeAlias = Callable[[Sequence[Mix]], None]
"""Says what each row is adapted with from now on."""
Rotary: TypeAlias = Callable[[Tensor, Tensor, str], Rotation]
"""From the stream (for its type), positions [tokens] and a kind of layer."""


class DecoderLoop:
    """Computes steps as the model itself would, which it takes its modules from and is compared with when loaded.

    Rows whose logits nobody wants end behind the last layer's attention.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        embed: Callable[[Tensor], Tensor],
        rotary: Rotary,
        norm: Norm,
        head: Callable[[Tensor], Tensor],
        embedding_factor: float = 1.0,
        logits_divisor: float = 1.0,
        softcap: float | None = None,
        adapt: Adapt | None = None,
    ) -> None:
        """adapt: of a model that has adapters; a step's rows are told before it is computed"""
        self._layers = layers
        self._adapt = adapt
        self._kinds = sorted({layer.attention.rope for layer in layers if layer.attention.rope is not None})
        self._embed = embed
        self._rotary = rotary
        self._norm = norm
        self._head = head
        self._embedding_factor = embedding_factor
        self._logits_divisor = logits_divisor
        self._softcap = softcap

    def __call__(self, step: Step) -> Tensor:
        """The wanted logits, [rows, vocab]. Writes keys and values at the step's places."""
        return self._logits(self.stream(step))

    def stream(self, step: Step) -> Tensor:
        """What the last layer gives of the rows whose logits are wanted, [rows, hidden]; writes keys and values."""
        x = self._embedded(step)
        rotations = {kind: self._rotary(x, step.positions, kind) for kind in self._kinds}
        if self._adapt is not None and any(step.mixes):
            self._adapt(step.mixes)
        change: Change | None = None
        for number, layer in enumerate(self._layers):
            attended = self._attended(number, layer, step, layer.begin(x, change), rotations)
            if number < len(self._layers) - 1:
                change = layer.finish(x, attended)
        return self._finish(step, x, attended)

    def _finish(self, step: Step, x: Tensor, attended: Tensor) -> Tensor:
        """What follows the last layer's attention, of the rows whose logits are wanted."""
        x, attended = x.index_select(0, step.logit_rows), attended.index_select(0, step.logit_rows)
        if self._adapt is not None and any(step.mixes):
            self._adapt(step.logit_mixes)
        self._layers[-1].finish(x, attended).add_to(x)
        return x

    def _embedded(self, step: Step) -> Tensor:
        """[tokens, hidden], a tensor of its own."""
        x = self._embed(step.token_ids)
        if step.embeddings is not None and step.illustrated is not None:
            x = x.index_copy(0, step.illustrated, step.embeddings)
        return x if self._embedding_factor == 1.0 else x * self._embedding_factor

    def _attended(
        self, number: int, layer: Layer, step: Step, normed: Tensor, rotations: dict[str, Rotation]
    ) -> Tensor:
        attention = layer.attention
        rotation = None if attention.rope is None else rotations[attention.rope]
        query, key, value = attention.project(normed, rotation)
        return step.attention.run(number, query, key, value, scoring=attention.scoring).flatten(1)

    def _logits(self, x: Tensor) -> Tensor:
        logits = self._head(self._norm(x))
        if self._logits_divisor != 1.0:
            logits = logits / self._logits_divisor
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


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
