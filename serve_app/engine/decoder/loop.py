"""Computes llama-like decoders in one loop: a step in, logits out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from serve_app.engine.decoder.linears import LinearPart, unwrapped
from serve_app.engine.decoder.step import Step
from serve_app.engine.decoder.text_part import FAMILIES, text_config
from serve_app.engine.kv.storage import KeyValueShape
from serve_app.engine.lora.modules import BankedLinear, Parts
from serve_app.engine.lora.plan import Mix
from serve_app.engine.tensor_parallel.workers import Collectives
from serve_app.kernels.forms import Scoring

Norm: TypeAlias = Callable[[Tensor], Tensor]
"""Of the last dimension, out of place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the stream: an amount, [tokens, hidden], times a factor."""

    amount: Tensor
    factor: float

    def add_to(self, x: Tensor) -> None:
        x.add_(self.amount, alpha=self.factor)


def added_and_normed(x: Tensor, change: Change | None, norm: Norm | None) -> Tensor:
    """Add a change to the stream, in place, and give the norm of that; without one the stream itself."""
    if change is not None:
        change.add_to(x)
    return x if norm is None else norm(x)


def root_mean_square(weight: Tensor, eps: float) -> Norm:
    """Return x / √(mean(x²) + eps) · weight (arXiv 1910.07467), computed in float32. weight: [size] float32

    It is faster than `F.rms_norm`, which takes the same for a mean as for every other operation.
    """
    size = weight.shape[0]
    scaled, least = weight * size**0.5, eps * size  # of the sum of squares, where the mean is meant

    def norm(x: Tensor) -> Tensor:
        exact = x.float()
        factor: Tensor = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_().add_(least).rsqrt_()
        return (exact * factor).mul_(scaled).to(x.dtype)

    return norm


def norm_of(module: Any, *, offset: float) -> Norm | None:
    """Return a function that computes a norm of transformers; None for one of another kind.

    offset: what is added to its weight (Gemma keeps what is over one)
    """
    if not isinstance(module, nn.Module):
        return None
    kind = type(module).__name__
    if kind == "OlmoLayerNorm":
        return lambda x: F.layer_norm(x.float(), x.shape[-1:], eps=1e-5).to(x.dtype)  # it has learned nothing
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not kind.endswith("RMSNorm") or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    return root_mean_square(weight.detach().float() + offset, eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The rotation of queries and keys at their positions (arXiv 2104.09864), the same in all layers of one kind.

    cos, sin: [tokens, 1, rotated], sin negative in its first half
    """

    cos: Tensor
    sin: Tensor

    def turn(self, heads: Tensor) -> Tensor:
        """[tokens, heads, dim]; dimensions beyond those that are rotated stay."""
        size = self.cos.shape[-1]
        turned = heads if size == heads.shape[-1] else heads[..., :size]
        turned = torch.addcmul(turned * self.cos, turned.roll(size // 2, -1), self.sin).to(heads.dtype)
        return turned if size == heads.shape[-1] else torch.cat([turned, heads[..., size:]], dim=-1)


class Product:
    """Linears that read the same input, as one product where they are joined, with what adapters change of each.

    changes: those
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        """modules: as they are in the model; parts of a joint linear are all there, in their order"""
        bases = [each.base if isinstance(each, BankedLinear) else each for each in modules]
        wholes = [base.joint.whole if isinstance(base, LinearPart) else base for base in bases]
        self._wholes = list(dict.fromkeys(wholes))
        changes, begin = [], 0
        for module, base in zip(modules, bases, strict=True):
            end = begin + int(base.out_features)  # type: ignore[arg-type]
            if isinstance(module, BankedLinear):
                changes.append((begin, end, module))
            begin = end
        self.changes = Parts(changes)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] to [tokens, outputs]"""
        y: Tensor = self._wholes[0](x)
        if len(self._wholes) > 1:
            y = torch.cat([y, *(whole(x) for whole in self._wholes[1:])], dim=-1)
        self.changes.change(y, x)
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention of one layer: its linears, norms, rotation and scoring.

    num_queries, num_keys: heads of queries, and of keys or values;  dim: of each
    norms:   of queries and of keys; of each head, or if `norms_rows` of all heads together
    clip:    bounds queries, keys and values to ±clip
    rope:    which rotation; None if positions are not told
    scoring: how keys are weighed
    """

    num_queries: int
    num_keys: int
    dim: int
    inputs: Product
    output: Callable[[Tensor], Tensor]
    norms: tuple[Norm, Norm] | None
    norms_rows: bool
    clip: float | None
    rope: str | None
    scoring: Scoring

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [tokens, heads, dim], keys and values [tokens, kv_heads, dim]."""
        joined = self.inputs(x)
        if self.clip is not None:
            joined.clamp_(-self.clip, self.clip)
        if self.norms is not None and self.norms_rows:
            ends = [self.num_queries * self.dim, (self.num_queries + self.num_keys) * self.dim]
            for part, norm in zip(joined.tensor_split(ends, dim=1), self.norms, strict=False):
                part.copy_(norm(part))
        split = joined.view(joined.shape[0], -1, self.dim)
        turned, value = split.tensor_split([self.num_queries + self.num_keys], dim=1)
        if self.norms is not None and not self.norms_rows:
            parts = zip(turned.tensor_split([self.num_queries], dim=1), self.norms, strict=True)
            turned = torch.cat([norm(part) for part, norm in parts], dim=1)
        if rotation is not None:
            turned = rotation.turn(turned)
        query, key = turned.tensor_split([self.num_queries], dim=1)
        return query, key, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """activation: of the first half of what `inputs` gives, before that is multiplied by the second"""

    inputs: Product
    activation: Callable[[Tensor], Tensor]
    output: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.inputs(x).chunk(2, dim=-1)
        return self.output(self.activation(gate).mul_(up))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Norms are None where a family has none at that place.

    residual: what is added to the stream is multiplied by it
    """

    attention: Attention
    mlp: Mlp
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    residual: float = 1.0

    def summed(self, sums: Collectives) -> Layer:
        """Return the layer of a divided model: it sums what attention and MLP give, adapters' changes included."""
        attention, mlp = self.attention, self.mlp
        return replace(
            self,
            attention=replace(attention, output=lambda x: sums.total(attention.output(x))),
            mlp=replace(mlp, output=lambda x: sums.total(mlp.output(x))),
        )

    def begin(self, x: Tensor, change: Change | None) -> Tensor:
        """Return the input of attention. Changes the stream x [tokens, hidden] in place.

        change: of the layer before
        """
        return added_and_normed(x, change, self.before_attention)

    def finish(self, x: Tensor, attended: Tensor) -> Change:
        """Compute what follows attention. Changes the stream in place, and returns what is to be added to it at last.

        attended: [tokens, heads · dim]
        """
        change = self._change(self.attention.output(attended), self.after_attention)
        return self._change(self.mlp(added_and_normed(x, change, self.before_mlp)), self.after_mlp)

    def _change(self, found: Tensor, norm: Norm | None) -> Change:
        return Change(amount=found if norm is None else norm(found), factor=self.residual)


def activation_of(module: Any) -> Callable[[Tensor], Tensor]:
    """An activation of transformers, by torch's own function where there is one: it makes a new tensor."""
    if type(module).__name__ in {"SiLU", "SiLUActivation"}:
        return F.silu
    activation: Callable[[Tensor], Tensor] = module
    return activation


Adapt: TypeAlias = Callable[[Sequence[Mix]], None]
"""Says what each row is adapted with from now on."""
Rotary: TypeAlias = Callable[[Tensor, Tensor, str], Rotation]
"""From the stream (for its type), positions [tokens] and a kind of layer."""


@dataclass(frozen=True, kw_only=True)
class DecoderLoop:
    """Computes steps as the model itself would, which it takes its modules from and is compared with when loaded.

    Rows whose logits nobody wants end behind the last layer's attention.

    adapt: of a model that has adapters; a step's rows are told before it is computed
    """

    layers: Sequence[Layer]
    embed: Callable[[Tensor], Tensor]
    rotary: Rotary
    norm: Norm
    head: Callable[[Tensor], Tensor]
    embedding_factor: float = 1.0
    logits_divisor: float = 1.0
    softcap: float | None = None
    adapt: Adapt | None = None

    @cached_property
    def _kinds(self) -> list[str]:
        return sorted({layer.attention.rope for layer in self.layers if layer.attention.rope is not None})

    def __call__(self, step: Step) -> Tensor:
        """Return the wanted logits, [rows, vocab]. Writes keys and values at the step's places."""
        return self._logits(self.stream(step))

    def stream(self, step: Step) -> Tensor:
        """Return the last layer's output of the rows that are wanted, [rows, hidden]. Writes keys and values."""
        x = step.images.put_into(self.embed(step.token_ids))
        x = x if self.embedding_factor == 1.0 else x * self.embedding_factor
        rotations = {kind: self.rotary(x, step.positions, kind) for kind in self._kinds}
        if self.adapt is not None and any(step.mixes):
            self.adapt(step.mixes)
        change: Change | None = None
        for number, layer in enumerate(self.layers):
            attended = self._attended(number, layer, step, layer.begin(x, change), rotations)
            if number < len(self.layers) - 1:
                change = layer.finish(x, attended)
        return self._finish(step, x, attended)

    def _finish(self, step: Step, x: Tensor, attended: Tensor) -> Tensor:
        """Compute what follows the last layer's attention, for the rows whose logits are wanted."""
        x, attended = x.index_select(0, step.logit_rows), attended.index_select(0, step.logit_rows)
        if self.adapt is not None and any(step.mixes):
            self.adapt(step.logit_mixes)
        self.layers[-1].finish(x, attended).add_to(x)
        return x

    def _attended(
        self, number: int, layer: Layer, step: Step, normed: Tensor, rotations: dict[str, Rotation]
    ) -> Tensor:
        attention = layer.attention
        rotation = None if attention.rope is None else rotations[attention.rope]
        query, key, value = attention.project(normed, rotation)
        return step.attention.run(number, query, key, value, scoring=attention.scoring).flatten(1)

    def _logits(self, x: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        if self.logits_divisor != 1.0:
            logits = logits / self.logits_divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
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
"""Modules that the loop knows."""


class NotDescribed(ValueError):
    """A model has something that the loop does not know."""


def norm_offset_of(module: PreTrainedModel) -> float | None:
    """Return what a model that the loop is tried on adds to the weights of norms; None of any other."""
    return FAMILIES.get(str(text_config(module.config).model_type))


def build_loop(
    module: PreTrainedModel,
    shape: KeyValueShape,
    scorings: Scorings,
    *,
    sums: Collectives | None = None,
    adapt: Adapt | None = None,
) -> DecoderLoop:
    """Build the loop over a model's modules, with adapters that are wrapped around them. Raises NotDescribed.

    sums:  of a divided model
    adapt: of a model that has adapters
    """
    offset, decoder = norm_offset_of(module), module.get_decoder()
    if offset is None:
        raise NotDescribed(f"{text_config(module.config).model_type} is no family of the loop's")
    if shape.places or shape.readers:
        raise NotDescribed("layers read what others wrote")
    _check_known(decoder, "decoder")
    config: Any = decoder.config
    found: Any = decoder.layers
    layers = [_layer(each, number, decoder, shape, scorings[number], offset) for number, each in enumerate(found)]
    norm = norm_of(decoder.norm, offset=offset)
    head: Any = module.get_output_embeddings()
    if norm is None or head is None:
        raise NotDescribed("its last norm or its head is of another kind")
    return DecoderLoop(
        layers=layers if sums is None else [layer.summed(sums) for layer in layers],
        embed=module.get_input_embeddings(),
        rotary=_rotary(decoder.rotary_emb),
        norm=norm,
        head=head,
        embedding_factor=float(getattr(decoder, "embedding_multiplier", 1.0)),
        logits_divisor=float(getattr(config, "logits_scaling", 1.0)),
        softcap=getattr(config, "final_logit_softcapping", None),
        adapt=adapt,
    )


def _layer(layer: Any, number: int, decoder: Any, shape: KeyValueShape, scoring: Scoring, offset: float) -> Layer:
    _check_known(layer, "layer")
    norms = _norms(layer, offset)
    return Layer(
        attention=_attention(layer.self_attn, number, decoder, shape, scoring, offset),
        mlp=_mlp(layer.mlp),
        before_attention=norms[0],
        after_attention=norms[1],
        before_mlp=norms[2],
        after_mlp=norms[3],
        residual=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _norms(layer: Any, offset: float) -> tuple[Norm | None, Norm | None, Norm | None, Norm | None]:
    """Return the norms before and after attention, before and after the MLP, by transformers' names."""
    has = {name for name in NORMS if hasattr(layer, name)}
    found = {name: norm_of(getattr(layer, name), offset=offset) for name in has}
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
    module: Any, number: int, decoder: Any, shape: KeyValueShape, scoring: Scoring, offset: float
) -> Attention:
    _check_known(module, "attention")
    kept, inputs = shape.layers[number], _modules(module, INPUTS)
    if kept.key_dim != kept.value_dim:
        raise NotDescribed("keys and values differ in size")
    width = sum(int(each.out_features) for each in map(unwrapped, inputs)) // kept.key_dim
    found = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (norm_of(each, offset=offset) for each in found)
    if found != [None, None] and (query_norm is None or key_norm is None):
        raise NotDescribed("its norms of queries and keys are of another kind")
    rope = str(decoder.config.layer_types[number]) if _is_by_type(decoder.rotary_emb) else ""
    return Attention(
        num_queries=width - 2 * kept.heads,
        num_keys=kept.heads,
        dim=kept.key_dim,
        inputs=Product(inputs),
        output=Product([module.o_proj]),
        norms=(query_norm, key_norm) if query_norm is not None and key_norm is not None else None,
        norms_rows=found[0] is not None and found[0].weight.shape[0] != kept.key_dim,
        clip=getattr(decoder.config, "clip_qkv", None),
        rope=rope if getattr(module, "use_rope", True) else None,
        scoring=scoring,
    )


def _mlp(module: Any) -> Mlp:
    _check_known(module, "mlp")
    return Mlp(
        inputs=Product(_modules(module, MLP_INPUTS)),
        activation=activation_of(getattr(module, "act_fn", getattr(module, "activation_fn", None))),
        output=Product([module.down_proj]),
    )


def _rotary(module: Any) -> Rotary:
    """Return the model's own rotary embedding; some have one for each type of layer, and most fixed frequencies."""
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
    """Return the modules of the first choice that the parent has all of."""
    for names in choices:
        if all(hasattr(parent, name) for name in names):
            return [getattr(parent, name) for name in names]
    raise NotDescribed(f"{type(parent).__name__} has none of {choices}")


def _check_known(module: nn.Module, kind: str) -> None:
    others = [(name, child) for name, child in module.named_children() if name not in KNOWN[kind]]
    strange = [name for name, child in others if [*child.parameters(), *child.buffers()]]
    if strange or any(True for _ in module.parameters(recurse=False)):
        raise NotDescribed(f"{type(module).__name__} has {strange or 'parameters of its own'}")
