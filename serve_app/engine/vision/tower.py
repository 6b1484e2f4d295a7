"""The vision encoder, taken out of a model: turns a decoded image into embeddings of a prompt."""

from __future__ import annotations

import struct
import zlib
from copy import copy, deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageOps
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from serve_app.core.errors import EngineFailed, InvalidRequest
from serve_app.core.prompt import Image
from serve_app.engine.config import EngineConfig
from serve_app.engine.vision.images import DecodedImage, ImageEmbeddings
from serve_app.engine.vision.support import Inputs, VisionSupport

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
ANIMATED = frozenset({"PNG", "GIF", "WEBP"})
MAX_RATIO = 200
"""Of the longer side to the shorter: what a model makes of a longer strip is larger than the strip, or nothing."""
MAX_SCANS = 40
"""Of a JPEG: each is a pass over all of its pixels, and takes a few bytes. Writers of progressive files use ten."""
MAX_REASON_CHARS = 120
SCAN = b"\xff\xda"
BROKEN = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, OverflowError, struct.error, zlib.error)
"""What the library raises where a file is not what it says."""


class VisionTower:
    """The vision modules with a configuration of their own; the model has none of them any more.

    token_id:   that stands for each row of embeddings;  marker: its text
    max_pixels: of one image
    """

    def __init__(self, module: PreTrainedModel, vision: VisionSupport, *, marker: str, max_pixels: int) -> None:
        without_own_bound()
        self.module = module
        self.marker = marker
        self.token_id = int(module.config.image_token_id)
        self._kind = vision.kind
        self._processor = vision.processor
        self._max_pixels = max_pixels

    @property
    def around(self) -> tuple[str, str]:
        """Return the texts around an image whose place alone a client wrote."""
        return self._kind.around

    def check(self, image: Image) -> None:
        """Check an image's header. Raises InvalidRequest."""
        open_image(image, max_pixels=self._max_pixels)

    def count(self, image: Image) -> int:
        """Return how many rows of embeddings an image takes in a prompt. Raises InvalidRequest."""
        return self._kind.text(self.module.config, self.marker, self._inputs(image)).count(self.marker)

    def decode(self, image: Image) -> DecodedImage:
        """Decode an image into the inputs of the tower. Raises InvalidRequest."""
        inputs = self._inputs(image)
        text = self._kind.text(self.module.config, self.marker, inputs)
        return DecodedImage(
            digest=image.digest,
            text=text,
            num_rows=text.count(self.marker),
            grid=self._kind.grid(self.module.config, inputs),
            inputs={name: inputs[name] for name in self._kind.takes if name in inputs},
        )

    @torch.inference_mode()
    def encode(self, read: DecodedImage) -> ImageEmbeddings:
        """Compute an image's embeddings; this takes as long as a long prompt."""
        module: Any = self.module
        inputs = {name: tensor.to(module.device) for name, tensor in read.inputs.items()}
        rows = torch.cat(list(module.get_image_features(**inputs).pooler_output), dim=0).to(module.dtype)
        if len(rows) != read.num_rows:
            raise EngineFailed(f"the vision tower gave {len(rows)} embeddings for {read.num_rows} places")
        return ImageEmbeddings(digest=read.digest, text=read.text, grid=read.grid, rows=rows)

    def _inputs(self, image: Image) -> Inputs:
        opened = pixels_of(open_image(image, max_pixels=self._max_pixels), image)
        try:
            inputs: Inputs = self._processor(images=opened, return_tensors="pt", **dict.fromkeys(self._kind.asks, True))
        except ValueError as error:  # of sizes that it makes nothing of
            raise InvalidRequest.refusing(
                image.name, must="be of a size that the model takes", found=f"{opened.width} × {opened.height}: {error}"
            ) from error
        return inputs


def take_tower(module: PreTrainedModel, vision: VisionSupport, config: EngineConfig) -> VisionTower | str:
    """Take the vision tower out of a loaded model. Return why not if its tokenizer has no image token."""
    tower = take_out(module, vision)
    token_id = int(tower.config.image_token_id)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(Path(config.path) / "tokenizer.json"))
    marker: str | None = tokenizer.convert_ids_to_tokens(token_id)
    if marker is None:
        return f"its tokenizer has no token {token_id}, which its config.json has for images"
    return VisionTower(tower, vision, marker=marker, max_pixels=config.max_image_pixels)


def take_out(module: PreTrainedModel, vision: VisionSupport) -> PreTrainedModel:
    """Move the vision modules of a model into a copy of its base, which has nothing else.

    The copy has its own configuration, so that the attention of one is never set for the other.
    """
    base: Any = module.model
    tower: PreTrainedModel = copy(base)
    tower._modules = {name: base._modules[name] for name in vision.kind.modules}
    for name in vision.kind.modules:
        base._modules[name] = None
    known: dict[int, Any] = {}
    for each in tower.modules():
        config: Any = getattr(each, "config", None)
        if isinstance(config, PreTrainedConfig):
            each.config = deepcopy(config, known)
    tower.set_attn_implementation({"vision_config": "sdpa"})
    return tower


def open_image(image: Image, *, max_pixels: int) -> PIL.Image.Image:
    """Read an image's header and decode no pixel of it.

    Raises InvalidRequest, which names the image, if it is too large, animated, or no image file.
    """
    try:
        opened = PIL.Image.open(BytesIO(image.data), formats=FORMATS)
        _check(opened, image, max_pixels)
    except BROKEN as error:
        raise _broken(image, error) from error
    return opened


def pixels_of(opened: PIL.Image.Image, image: Image) -> PIL.Image.Image:
    """Decode the pixels in RGB, turned upright. Raises InvalidRequest if some are missing."""
    try:
        opened.load()
        return PIL.ImageOps.exif_transpose(opened).convert("RGB")
    except BROKEN as error:
        raise _broken(image, error) from error


def without_own_bound() -> None:
    """Leave the bound on pixels to `open_image`, which checks it before it decodes anything.

    Pillow warns at a number of its own choice, and refuses twice as many.
    """
    PIL.Image.MAX_IMAGE_PIXELS = None


def _check(opened: PIL.Image.Image, image: Image, max_pixels: int) -> None:
    """Refuse what the header says is too large, too long or animated."""
    width, height = opened.size
    if width * height > max_pixels:
        raise InvalidRequest.refusing(
            image.name, must=f"have at most {max_pixels} pixels", found=f"{width} × {height} = {width * height}"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        sides = f"be at most {MAX_RATIO} times as long one way as the other"
        raise InvalidRequest.refusing(image.name, must=sides, found=f"{width} × {height}")
    if opened.format in ANIMATED and getattr(opened, "is_animated", False):
        raise InvalidRequest.refusing(image.name, must="be one still image", found="an animation")
    num_scans = image.data.count(SCAN) if opened.format not in ANIMATED else 0
    if num_scans > MAX_SCANS:
        raise InvalidRequest.refusing(image.name, must=f"have at most {MAX_SCANS} scans", found=str(num_scans))


def _broken(image: Image, error: Exception) -> InvalidRequest:
    why = " ".join(str(error).split())[:MAX_REASON_CHARS] or type(error).__name__
    return InvalidRequest.refusing(image.name, must="be a whole image file", found=f"what cannot be read: {why}")
