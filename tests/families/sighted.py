"""Small random models that see, with image processor and tokenizer, and what transformers itself makes of a prompt."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from transformers import (
    AutoModelForImageTextToText,
    BatchFeature,
    GenerationConfig,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaImageProcessorPil,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)

from tests.families.making import SIZES, byte_tokenizer, fill, make_config

MARKER = "<image>"
PATCH = 14
TILES = {f"<row_{row + 1}_col_{column + 1}>": 0 for row in range(4) for column in range(4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighted:
    """One kind of model that sees.

    marker:    its own token for an image
    tokens:    special ones besides
    vision:    settings of the tower;  whole: of the model as a whole
    processor: makes its image processor
    inputs:    (tokenizer, image processor, prompt with `<image>`, images) to what `generate` takes
    """

    name: str
    variant: str = ""
    marker: str = MARKER
    tokens: tuple[str, ...] = ()
    vision: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    processor: Callable[[], Any]
    inputs: Callable[[Any, Any, str, list[PIL.Image.Image]], BatchFeature]
    seed: int = 0

    @property
    def label(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name


def _llava_inputs(tokenizer: Any, processor: Any, prompt: str, images: list[PIL.Image.Image]) -> BatchFeature:
    whole = LlavaProcessor(
        image_processor=processor,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return whole(images=images, text=prompt, return_tensors="pt", add_special_tokens=False)


def _llava_full_inputs(tokenizer: Any, processor: Any, prompt: str, images: list[PIL.Image.Image]) -> BatchFeature:
    whole = LlavaProcessor(
        image_processor=processor, tokenizer=tokenizer, patch_size=PATCH, vision_feature_select_strategy="full"
    )
    return whole(images=images, text=prompt, return_tensors="pt", add_special_tokens=False)


def _idefics_inputs(tokenizer: Any, processor: Any, prompt: str, images: list[PIL.Image.Image]) -> BatchFeature:
    whole = Idefics3Processor(image_processor=processor, tokenizer=tokenizer, image_seq_len=4)
    return whole(images=images, text=prompt, return_tensors="pt", add_special_tokens=False)


def _qwen_inputs(tokenizer: Any, processor: Any, prompt: str, images: list[PIL.Image.Image]) -> BatchFeature:
    """As `Qwen2VLProcessor` does, which wants a processor of videos that wants another package."""
    pixels = processor(images=images, return_tensors="pt")
    for grid in pixels["image_grid_thw"]:
        pads = "<|image_pad|>" * int(grid.prod() // processor.merge_size**2)
        prompt = prompt.replace(MARKER, f"<|vision_start|>{pads}<|vision_end|>", 1)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    pads = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    mask = torch.ones_like(ids)
    types = (ids == pads).int()
    return BatchFeature({"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": types, **pixels})


LLAVA = Sighted(
    name="llava",
    vision={"image_size": 28, "patch_size": PATCH, "projection_dim": 16},
    whole={"vision_feature_select_strategy": "default", "vision_feature_layer": -1},
    processor=lambda: LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
    inputs=_llava_inputs,
)
LLAVA_SIGLIP = Sighted(
    name="llava",
    variant="siglip",
    vision={"model_type": "siglip_vision_model", "image_size": 28, "patch_size": PATCH},
    whole={"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    processor=lambda: LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
    inputs=_llava_full_inputs,
)
IDEFICS3 = Sighted(
    name="idefics3",
    tokens=("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES),
    vision={"image_size": 56, "patch_size": PATCH},
    whole={"scale_factor": 2},
    processor=lambda: Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56}),
    inputs=_idefics_inputs,
)
SMOLVLM = Sighted(
    name="smolvlm",
    tokens=IDEFICS3.tokens,
    vision=IDEFICS3.vision,
    whole=IDEFICS3.whole,
    processor=IDEFICS3.processor,
    inputs=_idefics_inputs,  # its own processor wants packages for videos, and writes the same for images
)
QWEN2_VL = Sighted(
    name="qwen2_vl",
    marker="<|image_pad|>",
    tokens=("<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    vision={"hidden_size": 32, "embed_dim": 16, "patch_size": PATCH, "spatial_merge_size": 2, "mlp_ratio": 2},
    text={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
    processor=lambda: Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28 * 6, "longest_edge": 28 * 28 * 12}),
    inputs=_qwen_inputs,
)
QWEN2_5_VL = Sighted(
    name="qwen2_5_vl",
    marker="<|image_pad|>",
    tokens=QWEN2_VL.tokens,
    vision={"hidden_size": 16, "out_hidden_size": 32, "patch_size": PATCH, "spatial_merge_size": 2, "window_size": 56},
    text=QWEN2_VL.text,
    processor=QWEN2_VL.processor,
    inputs=_qwen_inputs,
)
SIGHTED = (LLAVA, LLAVA_SIGLIP, IDEFICS3, SMOLVLM, QWEN2_VL, QWEN2_5_VL)


def save_sighted(kind: Sighted, folder: Path, *, base: PreTrainedTokenizerFast | None = None) -> None:
    """Write weights, config, tokenizer and image processor. base: the tokenizer without its own special tokens"""
    tokenizer = _tokenizer(kind, byte_tokenizer() if base is None else base)
    vocab_size = len(tokenizer)
    image_id = tokenizer.convert_tokens_to_ids(kind.marker)
    whole = {"image_token_id": image_id, **kind.whole}
    if kind.name == "llava":
        whole["image_token_index"] = whole.pop("image_token_id")
    for name in ("vision_start", "vision_end"):
        if f"<|{name}|>" in kind.tokens:
            whole[f"{name}_token_id"] = tokenizer.convert_tokens_to_ids(f"<|{name}|>")
    if "<|video_pad|>" in kind.tokens:
        whole["video_token_id"] = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    settings = {"vocab_size": vocab_size, "max_position_embeddings": 512, **kind.text}
    config = make_config(kind.name, {**settings, "vision_config": dict(kind.vision), "whole": whole})
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    fill(model, zlib.crc32(f"{kind.label} {kind.seed}".encode()))
    model.generation_config = GenerationConfig(
        bos_token_id=SIZES["bos_token_id"], eos_token_id=SIZES["eos_token_id"], pad_token_id=SIZES["pad_token_id"]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    kind.processor().save_pretrained(folder)


def _tokenizer(kind: Sighted, tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens({"additional_special_tokens": [kind.marker, *kind.tokens]})
    return tokenizer


def whole_model(folder: Path) -> PreTrainedModel:
    """As transformers loads it."""
    loaded: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
        folder, local_files_only=True, dtype="float32"
    )
    return loaded.eval()
