"""Finds the part of a model that computes text; of a multimodal model, all but its other encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from serve_app.engine.decoder.transformers_private import leave_unread


class ModelNotSupported(ValueError):
    """The model has something that this engine does not carry out, or does not fit; the message names it."""


def text_config(config: PreTrainedConfig) -> Any:
    """Return the part of a configuration that is about text; for a model of text alone, the whole."""
    return config.get_text_config(decoder=True)


def text_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that completes text with a checkpoint of this configuration.

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
    """Return the class with its vision tower. Raises ModelNotSupported."""
    if type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        raise ModelNotSupported(f"{config.model_type}: transformers has no class that completes text beside images")
    found: type[PreTrainedModel] = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    return found


def _without_towers(whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a class whose instances drop their towers before any weight is read."""

    def drop(model: Any, _: object) -> None:
        leave_unread(model, _drop_towers(model))

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
    """Return the modules from the model to its decoder, one inside the other."""
    if model is decoder:
        return [model]
    for child in model.children():
        way = _way(child, decoder)
        if way:
            return [model, *way]
    return []


FAMILIES: Mapping[str, float] = {
    **dict.fromkeys(
        (
            "cwm", "granite", "iquestcoder", "llama", "ministral", "mistral", "olmo", "olmo2", "olmo3", "phi3", "qwen2",
            "qwen3", "seed_oss", "smollm3",
        ),
        0.0,
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), 1.0),
}  # fmt: skip
"""What is added to the weights of norms, by the `model_type` of the part for text.

The loop is tried beside the model itself when that is loaded, and serves where the logits are the same. The table says
which are tried, since no check is long enough for all that a family may do.
"""


LONGROPE = "longrope"


def settle_longrope(module: nn.Module, max_model_len: int) -> None:
    """Fix LongRoPE's frequencies (arXiv 2402.13753), short or long, by the context that is served.

    transformers takes the long ones as soon as a batch's longest row exceeds the length that the model was first
    trained at. A sequence would depend on its company, and cached keys would not fit any more. Here every sequence has
    the long ones if the context exceeds that length, else the short ones.
    """
    embedding: Any  # of transformers' many kinds
    for embedding in module.modules():
        kind = getattr(embedding, "rope_type", None)  # some have one for each type of layer
        kinds = kind if isinstance(kind, dict) else {None: kind}
        for layer_type in (each for each, its_kind in kinds.items() if its_kind == LONGROPE):
            _settle(embedding, layer_type, max_model_len)


def _settle(embedding: Any, layer_type: str | None, max_model_len: int) -> None:
    named = {} if layer_type is None else {"layer_type": layer_type}
    parameters = (
        embedding.config.rope_parameters if layer_type is None else embedding.config.rope_parameters[layer_type]
    )
    original = int(parameters["original_max_position_embeddings"])
    chosen_for = original + 1 if max_model_len > original else original
    device = next(embedding.buffers()).device
    frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](embedding.config, device, seq_len=chosen_for, **named)
    prefix = "" if layer_type is None else f"{layer_type}_"
    for name in ("inv_freq", "original_inv_freq", "long_inv_freq"):  # it picks one of the last two: they are one
        setattr(embedding, prefix + name, frequencies.clone())


def take_over_scales(module: nn.Module) -> None:
    """Let no attention module scale its queries by itself: it counts a packed row from zero."""
    for layer in module.modules():
        if getattr(layer, "attn_temperature_tuning", False):
            layer.attn_temperature_tuning = False  # type: ignore[assignment]


def scales_queries(layer: Any) -> bool:
    """Return whether an attention module scales its queries: Llama 4's layers without rotary embedding."""
    return bool(getattr(getattr(layer, "config", None), "attn_temperature_tuning", False)) and not layer.use_rope


def query_scale(layer: Any, positions: Tensor) -> Tensor:
    """Return the factor of each query of a layer that `scales_queries`, [tokens] float32.

    1 + attn_scale · log(1 + ⌊(position + 1) / floor_scale⌋), after arXiv 2501.19399.
    """
    steps = torch.floor((positions.float() + 1.0) / layer.floor_scale)
    scale: float = layer.attn_scale
    return torch.log1p(steps) * scale + 1.0
