"""Finds the part of a model that computes text; of a multimodal model, all but its other encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from serve_app.engine.decoder.errors import ModelNotSupported


def text_config(config: PreTrainedConfig) -> Any:
    """What a configuration says of text; of a model of text alone, the whole."""
    return config.get_text_config(decoder=True)


def text_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that completes text with a checkpoint of this configuration.

    For a model that takes images or sounds as well it is transformers' own class for the whole, whose towers are not
    made: modules keep the names that checkpoints and adapters have for them, and the way from text to logits is the
    model's own. Raises ModelNotSupported.
    """
    if text_config(config) is not config and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return _without_towers(MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)])
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return found
    named = [class_named(name) for name in config.architectures or ()]
    for kind in named:
        if kind is not None and kind.config_class is type(config):
            return kind
    raise ModelNotSupported(f"{config.model_type}: transformers has no class that completes text with it")


def class_named(architecture: str) -> type[PreTrainedModel] | None:
    """Return the library's class of that name which completes text; None where there is none."""
    named: Any = getattr(transformers, architecture, None)
    if not isinstance(named, type) or not issubclass(named, PreTrainedModel):
        return None
    kind: Any = named
    found: type[PreTrainedModel] | None = kind if kind.config_class and kind.can_generate() else None
    return found


def whole_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The same with its towers, for a model that is to see. Raises ModelNotSupported."""
    if type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        raise ModelNotSupported(f"{config.model_type}: transformers has no class that completes text beside images")
    found: type[PreTrainedModel] = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    return found


def _without_towers(whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class, whose instances drop their towers before any weight is read."""

    def drop(model: Any, _: object) -> None:
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = ignored | {rf"(^|\.){name}\." for name in _drop_towers(model)}

    return extended(whole, drop)


def extended(kind: type[PreTrainedModel], then: Callable[[Any, Any], None]) -> type[PreTrainedModel]:
    """Return a class whose instances are made as those of `kind`, and then changed: then(model, configuration)."""

    def __init__(self: Any, config: Any, *positional: Any, **named: Any) -> None:
        kind.__init__(self, config, *positional, **named)
        then(self, config)

    # transformers finds the renaming of a checkpoint's tensors by the class's name
    members = {"__init__": __init__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), members)


def _drop_towers(model: PreTrainedModel) -> list[str]:
    """Take out every model inside the model beside the way to its decoder; give their names.

    Projections between a tower and the decoder are small, and some are asked about text too: they stay.
    """
    decoder = model.get_decoder()
    way = _way(model, decoder)
    if not way:
        raise ModelNotSupported(f"{model.config.model_type}: its language model is not a part that can be found")
    dropped = []
    for parent in way[:-1]:
        for name, child in list(parent.named_children()):
            if isinstance(child, PreTrainedModel) and not any(child is each for each in way):
                parent._modules[name] = None
                dropped.append(name)
    return dropped


def _way(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """The modules from the model to its decoder, one inside the other."""
    if model is decoder:
        return [model]
    for child in model.children():
        way = _way(child, decoder)
        if way:
            return [model, *way]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """norm_offset: what is added to the weights of norms"""

    norm_offset: float = 0.0


PLAIN = Family()
GEMMA = Family(norm_offset=1.0)

FAMILIES: Mapping[str, Family] = {
    "cwm": PLAIN,
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "granite": PLAIN,
    "iquestcoder": PLAIN,
    "llama": PLAIN,
    "ministral": PLAIN,
    "mistral": PLAIN,
    "olmo": PLAIN,
    "olmo2": PLAIN,
    "olmo3": PLAIN,
    "phi3": PLAIN,
    "qwen2": PLAIN,
    "qwen3": PLAIN,
    "seed_oss": PLAIN,
    "smollm3": PLAIN,
}
"""By the `model_type` of the part for text. The loop is tried beside the model itself when it is loaded, and serves
where the logits are the same; here is which are tried, since no trial is long enough for all that a family may do."""


LONGROPE = "longrope"


def settle_longrope(module: nn.Module, max_model_len: int) -> None:
    """Fix LongRoPE's frequencies (arXiv 2402.13753), short or long, by the context that is served.

    transformers takes the long ones as soon as the longest row of a batch exceeds the length the model was first
    trained at: what a sequence gets would depend on its company, and keys that are cached already would not fit any
    more. Here a context beyond that length has the long ones for every sequence, short ones included, and a context
    within it the short ones.
    """
    for rotary in _rotaries(module):
        original = int(rotary.parameters["original_max_position_embeddings"])
        chosen_for = original + 1 if max_model_len > original else original
        layer_type = {} if rotary.layer_type is None else {"layer_type": rotary.layer_type}
        embedding = rotary.embedding
        frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](
            embedding.config, next(embedding.buffers()).device, seq_len=chosen_for, **layer_type
        )
        for name in ("inv_freq", "original_inv_freq", "long_inv_freq"):  # it picks one of the last two: they are one
            setattr(embedding, rotary.prefix + name, frequencies.clone())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rotary:
    """One embedding that is LongRoPE, where layers differ for one type of layers."""

    embedding: Any
    layer_type: str | None
    parameters: dict[str, Any]

    @property
    def prefix(self) -> str:
        return "" if self.layer_type is None else f"{self.layer_type}_"


def _rotaries(module: nn.Module) -> Iterator[_Rotary]:
    embedding: Any  # of transformers' many kinds
    for embedding in module.modules():
        kind = getattr(embedding, "rope_type", None)
        if kind == LONGROPE:
            yield _Rotary(embedding=embedding, layer_type=None, parameters=embedding.config.rope_parameters)
        elif isinstance(kind, dict):
            for layer_type in (each for each, its_kind in kind.items() if its_kind == LONGROPE):
                parameters = embedding.config.rope_parameters[layer_type]
                yield _Rotary(embedding=embedding, layer_type=layer_type, parameters=parameters)


def take_over_scales(module: nn.Module) -> None:
    """Let no attention module scale its queries by itself: it counts a packed row from zero."""
    for layer in module.modules():
        if getattr(layer, "attn_temperature_tuning", False):
            layer.attn_temperature_tuning = False  # type: ignore[assignment]


def scales_queries(layer: Any) -> bool:
    """Whether an attention module's queries have a factor: Llama 4's layers without rotary embedding."""
    return bool(getattr(getattr(layer, "config", None), "attn_temperature_tuning", False)) and not layer.use_rope


def query_scale(layer: Any, positions: Tensor) -> Tensor:
    """The factor of each query of a layer that `scales_queries`, [tokens] float32.

    1 + attn_scale · log(1 + ⌊(position + 1) / floor_scale⌋), after arXiv 2501.19399.
    """
    steps = torch.floor((positions.float() + 1.0) / layer.floor_scale)
    scale: float = layer.attn_scale
    return torch.log1p(steps) * scale + 1.0
