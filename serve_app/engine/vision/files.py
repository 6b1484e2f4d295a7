"""Opens image files of clients within bounds: what a header says is checked before anything is decoded."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import PIL.Image
import PIL.ImageOps

from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Image

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
ANIMATED = frozenset({"PNG", "GIF", "WEBP"})
MAX_RATIO = 200
"""Of the longer side to the shorter: what a model makes of a longer strip is larger than the strip, or nothing."""
MAX_SCANS = 40
"""Of a JPEG: each is a pass over all of its pixels, and takes a few bytes. Writers of progressive files use ten."""
MAX_REASON_CHARS = 120
SCAN = b"\xff\xda"
BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
)
"""What the library raises where a file is not what it says."""


def open_image(image: Image, *, max_pixels: int) -> PIL.Image.Image:
    """Read an image's header; no pixel of it is decoded.

    Raises InvalidRequest that names the image where it is too large, moves, or is no file of its kind.
    """
    try:
        opened = PIL.Image.open(BytesIO(image.data), formats=FORMATS)
        _check(opened, image, max_pixels)
    except BROKEN as error:
        raise _broken(image, error) from error
    return opened


def decode(opened: PIL.Image.Image, image: Image) -> PIL.Image.Image:
    """Its pixels in RGB, upright as its camera was held. Raises InvalidRequest where they are not all there."""
    try:
        opened.load()
        return PIL.ImageOps.exif_transpose(opened).convert("RGB")
    except BROKEN as error:
        raise _broken(image, error) from error


def without_own_bound() -> None:
    """Have the library leave the number of pixels to `open_image`, which looks at it before anything is decoded.

    It warns at a number of its own choice, and refuses at twice as many.
    """
    PIL.Image.MAX_IMAGE_PIXELS = None


def _check(opened: PIL.Image.Image, image: Image, max_pixels: int) -> None:
    """Look at what the header says."""
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
