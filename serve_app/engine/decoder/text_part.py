"""The part of a model that computes text: all of it, or, where it sees and hears too, all of it but eyes and ears."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

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

    def __init__(self: Any, config: PreTrainedConfig, *positional: Any, **named: Any) -> None:
        whole.__init__(self, config, *positional, **named)
        dropped = _drop_towers(self)
        ignored = set(self._keys_to_ignore_on_load_unexpected or ())
        self._keys_to_ignore_on_load_unexpected = ignored | {rf"(^|\.){name}\." for name in dropped}

    # transformers finds the renaming of a checkpoint's tensors by the class's name
    members = {"__init__": __init__, "__module__": whole.__module__, "__qualname__": whole.__qualname__}
    return type(whole.__name__, (whole,), members)


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
