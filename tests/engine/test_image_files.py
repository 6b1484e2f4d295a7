"""Image files of strangers: what is decoded, what is refused, and how much is read before that."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable

import PIL.Image
import PIL.ImageFile
import pytest

from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Image
from serve_app.engine.vision.tower import MAX_SCANS, SCAN, open_image, pixels_of, without_own_bound
from tests.pictures import file_of, picture

MAX_PIXELS = 10_000


@pytest.fixture(autouse=True)
def _own_bound() -> None:
    without_own_bound()


def named(data: bytes) -> Image:
    return Image(data=data, name="images[0]")


def decoded(data: bytes) -> PIL.Image.Image:
    image = named(data)
    return pixels_of(open_image(image, max_pixels=MAX_PIXELS), image)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, body: bytes = b"", *, before: bytes = b"") -> bytes:
    """A PNG file that says it has this size, whatever it holds."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def animation(kind: str) -> bytes:
    return file_of(picture(1), kind, save_all=True, append_images=[picture(2), picture(3)])


def jpeg_of_scans(count: int) -> bytes:
    data = file_of(picture(1), "JPEG")
    return data[:-2] + (SCAN + b"\x00\x08\x01\x01\x00\x00\x3f\x00") * count + data[-2:]


BOMB = zlib.compress(bytes(40_000_000), 9)  # 40 MB in 40 kB
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "an empty file": (lambda: b"", "whole image file"),
    "a truncated PNG": (lambda: file_of(picture(1))[:-40], "whole image file"),
    "a truncated JPEG": (lambda: file_of(picture(1), "JPEG")[:-300], "whole image file"),
    "a truncated GIF": (lambda: file_of(picture(1), "GIF")[:40], "whole image file"),
    "a truncated WebP": (lambda: file_of(picture(1), "WEBP")[:-30], "whole image file"),
    "a header alone": (lambda: file_of(picture(1))[:33], "whole image file"),
    "a size that is too large": (lambda: file_of(picture(1, (200, 51))), "at most 10000 pixels"),
    "a huge size in a small file": (lambda: png(50_000, 50_000, BOMB), "50000 × 50000"),
    "the largest size there is": (lambda: png(2**31 - 1, 2**31 - 1), "at most 10000 pixels"),
    "no size at all": (lambda: png(0, 5), "image"),
    "a strip": (lambda: png(9000, 1, zlib.compress(bytes(27_001))), "200 times as long"),
    "more pixels than the size has": (lambda: png(10, 10, b"no zlib" + BOMB), "whole image file"),
    "a text that unpacks to much": (
        lambda: png(10, 10, before=chunk(b"zTXt", b"a\x00\x00" + BOMB)),
        "whole image file",
    ),
    "a profile that unpacks to much": (lambda: png(9, 9, before=chunk(b"iCCP", b"a\x00\x00" + BOMB)), "image file"),
    "an animated PNG": (lambda: animation("PNG"), "still image"),
    "an animated GIF": (lambda: animation("GIF"), "still image"),
    "an animated WebP": (lambda: animation("WEBP"), "still image"),
    "a JPEG of many passes": (lambda: jpeg_of_scans(5000), f"at most {MAX_SCANS} scans"),
    "another format": (lambda: file_of(picture(1), "BMP"), "whole image file"),
    "a program": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "whole image file"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_the_name_of_its_image(name: str) -> None:
    make, words = HOSTILE[name]
    with pytest.raises(InvalidRequest) as caught:
        decoded(make())
    assert caught.value.param == "images[0]"
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_bytes_that_were_changed_are_decoded_or_refused_and_nothing_else(kind: str) -> None:
    data, draw = file_of(picture(1), kind), random.Random(7)
    refused = 0
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(draw.randrange(1, 6)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        del changed[draw.randrange(len(changed) // 2, len(changed) + 1) :]
        try:
            assert decoded(bytes(changed)).mode == "RGB"
        except InvalidRequest:
            refused += 1
    assert refused > 0


class CountedFile(io.BytesIO):
    """Counts what is read of it."""

    num_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(-1 if size is None else size)
        self.num_read += len(found)
        return found


def test_the_size_is_known_before_anything_is_decoded() -> None:
    """What refuses a picture that is too large has read its header, not its pixels."""
    data = png(50_000, 50_000, BOMB * 20)
    counted = CountedFile(data)
    opened = PIL.Image.open(counted, formats=("PNG",))
    assert opened.size == (50_000, 50_000)
    assert counted.num_read < 100 < len(data)
    with pytest.raises(InvalidRequest, match="pixels"):
        open_image(named(data), max_pixels=MAX_PIXELS)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_every_way_to_keep_pixels_is_decoded_to_rgb(mode: str) -> None:
    image = PIL.Image.new("I;16", (40, 30)) if mode == "I;16" else picture(1).convert(mode)
    found = decoded(file_of(image))
    assert (found.mode, found.size) == ("RGB", (40, 30))


def test_a_picture_is_upright_as_its_camera_was_held() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert decoded(file_of(picture(1), "JPEG", exif=exif)).size == (30, 40)
