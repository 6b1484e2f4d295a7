"""Decides by a model's configuration, before any weight is read, whether it is served; for loading and for checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from serve_app.engine.errors import ModelNotSupported
from serve_app.engine.quantized.formats import Format, formats_of
from serve_app.engine.text_part import text_class, text_config, whole_class
from serve_app.engine.vision.judgement import Sight, judge_sight

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A model that may be loaded, with what its configuration says.

    config:  the whole, without what it says of quantisation;  text: its part for text, or the same
    kind:    the class that completes text with it
    sight:   how it sees, or why it does not here; None for a model of text
    formats: in which its weights are stored; None where they are plain
    max_model_len: its own context, in tokens
    """

    config: PreTrainedConfig
    text: Any
    kind: type[PreTrainedModel]
    sight: Sight | str | None
    formats: tuple[Format, ...] | None
    max_model_len: int

    @property
    def dtype(self) -> torch.dtype | None:
        """The numbers that its author means it to be computed in; None where nothing says so."""
        own: torch.dtype | None = self.config.dtype or self.text.dtype
        return own


def judge(path: str | Path, *, with_images: bool = True) -> Judged:
    """Read a folder's config.json. The probe has the last word, when the weights are there.

    with_images: whether a model that can see is to

    Raises ModelNotSupported, which names what is in the way.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelNotSupported(f"config.json: {error}") from error
    name, text = config.model_type, text_config(config)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelNotSupported(f"{name}: encoder-decoder models are not supported")
    formats = _take_formats(config)
    for layer_type in getattr(text, "layer_types", None) or ():
        if layer_type not in SUPPORTED_LAYER_TYPES:
            raise ModelNotSupported(f"{name}: layers of type {layer_type} are not supported")
    length = getattr(text, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelNotSupported(f"{name}: config.json has no max_position_embeddings")
    sight = judge_sight(config, path, is_wanted=with_images)
    kind = whole_class(config) if isinstance(sight, Sight) else text_class(config)
    return Judged(config=config, text=text, kind=kind, sight=sight, formats=formats, max_model_len=length)


def _take_formats(config: PreTrainedConfig) -> tuple[Format, ...] | None:
    """How weights are stored. Takes the announcement out of the configuration: what is loaded is plain."""
    found: Any = None
    for part in (config, text_config(config)):
        for name in ("quantization_config", "compression_config"):
            if getattr(part, name, None) is not None:
                found = found or getattr(part, name)
                delattr(part, name)
    if found is None:
        return None
    return formats_of(found if isinstance(found, dict) else found.to_dict(), config.model_type)
