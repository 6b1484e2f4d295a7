"""Which vision models are supported: their modules, their image tokens, and the check of a model's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoImageProcessor

Inputs = Mapping[str, Any]
"""What an image processor made of one image, its tensors by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionKind:
    """How the models of one family take images.

    modules:  of transformers' base model, which nothing but images needs
    asks:     of the image processor, beside the image: options that are switched on
    takes:    of what it gives, by the names of `get_image_features`
    text:     (config, marker, inputs) to what stands in the text for the image, a marker for each row of embeddings
    grid:     (config, inputs) to its rows and columns of embeddings, where positions follow them; else None
    around:   texts before and behind it, where a client wrote no more than its place
    fault:    why a configuration is of no such kind after all; None where it is
    """

    modules: tuple[str, ...]
    takes: tuple[str, ...]
    text: Callable[[Any, str, Inputs], str]
    asks: tuple[str, ...] = ()
    grid: Callable[[Any, Inputs], tuple[int, int] | None] = lambda config, inputs: None
    around: tuple[str, str] = ("", "")
    fault: Callable[[Any], str | None] = lambda config: None


CLASS_TOKENS: Mapping[str, int] = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Towers of LLaVA, with the embeddings that they put before those of the patches."""


def _llava_text(config: Any, marker: str, inputs: Inputs) -> str:
    pixels: Tensor = inputs["pixel_values"]
    height, width = pixels.shape[-2:]
    patch = int(config.vision_config.patch_size)
    count = (height // patch) * (width // patch) + CLASS_TOKENS[config.vision_config.model_type]
    is_first_left_out = bool(config.vision_feature_select_strategy == "default")
    return marker * (int(count) - is_first_left_out)


def _llava_fault(config: Any) -> str | None:
    tower = config.vision_config.model_type
    return None if tower in CLASS_TOKENS else f"towers of type {tower} are not supported"


FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"


def _idefics_text(config: Any, marker: str, inputs: Inputs) -> str:
    """Return the text of an image: its tiles row by row if it is large, then the whole."""
    vision = config.vision_config
    tile = marker * int((vision.image_size // vision.patch_size) ** 2 / config.scale_factor**2)
    num_rows, num_columns = inputs["rows"][0][0], inputs["cols"][0][0]
    rows = [
        "".join(f"{FAKE}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(num_columns)) + "\n"
        for row in range(num_rows)
    ]
    return "".join(rows) + ("\n" if rows else "") + f"{FAKE}{WHOLE}{tile}{FAKE}"


def _qwen_grid(config: Any, inputs: Inputs) -> tuple[int, int]:
    grid: Tensor = inputs["image_grid_thw"][0]
    merged = int(config.vision_config.spatial_merge_size)
    return int(grid[1]) // merged, int(grid[2]) // merged


def _qwen_text(config: Any, marker: str, inputs: Inputs) -> str:
    num_rows, num_columns = _qwen_grid(config, inputs)
    return marker * (num_rows * num_columns)


LLAVA = VisionKind(
    modules=("vision_tower", "multi_modal_projector"), takes=("pixel_values",), text=_llava_text, fault=_llava_fault
)
IDEFICS = VisionKind(
    modules=("vision_model", "connector"),
    takes=("pixel_values", "pixel_attention_mask"),
    asks=("return_row_col_info",),
    text=_idefics_text,
)
QWEN = VisionKind(
    modules=("visual",),
    takes=("pixel_values", "image_grid_thw"),
    text=_qwen_text,
    grid=_qwen_grid,
    around=("<|vision_start|>", "<|vision_end|>"),
)

KINDS: Mapping[str, VisionKind] = {
    "llava": LLAVA,
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
}
"""By `model_type`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSupport:
    """How a model takes images. processor: transformers' own, which makes of an image what the tower takes"""

    kind: VisionKind
    processor: Any


def find_vision_support(config: Any, path: str | Path, *, is_wanted: bool = True) -> VisionSupport | str | None:
    """Return how the model takes images, or why it does not here; None for a model of text.

    is_wanted: as its operator has configured it
    """
    if getattr(config, "vision_config", None) is None:
        return None
    if not is_wanted:
        return "its operator has switched images off"
    kind = KINDS.get(config.model_type)
    if kind is None:
        return f"images of {config.model_type} are not supported, its text is"
    if (fault := kind.fault(config)) is not None:
        return f"{config.model_type}: {fault}"
    try:
        processor = AutoImageProcessor.from_pretrained(
            path, config=config, local_files_only=True, trust_remote_code=False, backend="pil"
        )
    except (OSError, ValueError, TypeError, ImportError) as error:
        return f"its folder has no image processor that can be used: {str(error).strip().splitlines()[0][:200]}"
    return VisionSupport(kind=kind, processor=processor)
