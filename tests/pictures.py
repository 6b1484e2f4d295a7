"""Small pictures, as files and as clients send them."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

import PIL.Image


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> PIL.Image.Image:
    """Random patches of colour."""
    draw = random.Random(seed)
    small = PIL.Image.new("RGB", (4, 3))
    for at in range(12):
        small.putpixel((at % 4, at // 4), (draw.randrange(256), draw.randrange(256), draw.randrange(256)))
    return small.resize(size, PIL.Image.Resampling.NEAREST)


def file_of(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def sent(seed: int, kind: str = "PNG", *, as_uri: bool = True) -> str:
    """A picture as a client sends it."""
    text = encoded(file_of(picture(seed), kind))
    return f"data:image/{kind.lower()};base64,{text}" if as_uri else text
