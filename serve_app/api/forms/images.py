"""Reads images, as data URIs and bare base64, by their first bytes; nothing is decoded, and no URL is fetched."""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping, Sequence

from serve_app.api.error_text import shown
from serve_app.api.forms.form import Terms, Value, check_amount
from serve_app.api.forms.schema import STRING, Schema, array, either
from serve_app.api.limits import WireLimits
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import MARKER, Image, Prompt

ALLOWED = "the base64 of a PNG, JPEG, GIF or WebP file, bare or as data:image/png;base64,…"
MOST_IMAGES = "hold at most {} images"
NO_URL = "No address is ever fetched: send what is there."
# Kinds by the beginning of the file in base64.
BEGINNINGS: Mapping[str, str] = {
    "iVBORw0KGgo": "image/png",
    "/9j/": "image/jpeg",
    "R0lGODdh": "image/gif",
    "R0lGODlh": "image/gif",
    "UklGR": "image/webp",
}
OTHER_MIMES: Mapping[str, str] = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg"}
HEADER = re.compile(r"(?:data:)?([a-z]+/[a-z0-9.+-]+)(?:;[a-z-]+=[^;,]*)*(?:;base64)?,", re.IGNORECASE)
MAX_HEADER_CHARS = 200
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
PATTERN = rf"^(data:image/[a-z]+;base64,|image/[a-z]+,)?({'|'.join(BEGINNINGS)})[A-Za-z0-9+/]*={{0,2}}$"

Illustrations = tuple[Image, ...] | tuple[tuple[Image, ...], ...]
"""Images of the one prompt, or of each."""


class Images:
    """A list for the one prompt, or one list for each prompt."""

    def words(self, terms: Terms) -> str:
        return f"a list of at most {terms.limits.max_images} images, or a list of such lists, one for each prompt"

    def schema(self, terms: Terms) -> Schema:
        flat = images_schema(terms.limits)
        return either(flat, array(flat, most=terms.limits.max_prompts))

    def read(self, value: Value) -> Illustrations:
        """Return the images; empty lists count as none."""
        limits = value.terms.limits
        if not isinstance(value.sent, list):
            raise value.refused(self.words(value.terms))
        if not all(isinstance(each, list) for each in value.sent):
            return read_images(value.sent, value.name, limits)
        if len(value.sent) > limits.max_prompts:
            raise value.refused(self.words(value.terms))
        check_amount(sum(map(len, value.sent)), limits.max_images, value.name, must=MOST_IMAGES)
        found = tuple(read_images(each, f"{value.name}[{at}]", limits) for at, each in enumerate(value.sent))
        return found if any(found) else ()


def images_schema(limits: WireLimits) -> Schema:
    """Return the schema of a list of images."""
    most = (limits.max_image_bytes + 2) // 3 * 4 + MAX_HEADER_CHARS
    return array({**STRING, "pattern": PATTERN, "maxLength": most}, most=limits.max_images)


def read_images(sent: Sequence[object], path: str, limits: WireLimits) -> tuple[Image, ...]:
    """Return each element as an image. Raises InvalidRequest that names it."""
    check_amount(len(sent), limits.max_images, path, must=MOST_IMAGES)
    return tuple(read_image(each, f"{path}[{at}]", limits) for at, each in enumerate(sent))


def read_image(sent: object, path: str, limits: WireLimits) -> Image:
    """Return the image that a text holds. Raises InvalidRequest."""
    if not isinstance(sent, str):
        raise InvalidRequest.refusing(path, must=f"be {ALLOWED}", found=shown(sent))
    if ADDRESS.match(sent) or sent[:5].lower() == "file:":
        raise InvalidRequest.refusing(path, must=f"be {ALLOWED}", found=shown(sent), remedy=NO_URL)
    header = HEADER.match(sent[:MAX_HEADER_CHARS])
    encoded = sent[header.end() :] if header else sent
    kind = next((mime for beginning, mime in BEGINNINGS.items() if encoded.startswith(beginning)), None)
    if kind is None:
        raise InvalidRequest.refusing(path, must=f"be {ALLOWED}", found=shown(sent))
    declared = header[1].lower() if header else kind
    if OTHER_MIMES.get(declared, declared) != kind:
        raise InvalidRequest.refusing(
            path, must=f"be of the kind that it says, {declared}", found=f"the bytes of {kind}"
        )
    return Image(data=_decoded(encoded, path, limits), name=path)


def in_places(prompt: Prompt, images: Sequence[Image], *, marker: str = MARKER, path: str) -> Prompt:
    """The prompt with images in the places of its markers; where there are no images, a marker is text like any other.

    Raises InvalidRequest where they are not as many as the markers.
    """
    if not images:
        return prompt
    num_markers = prompt.count(marker)
    if num_markers != len(images):
        must = f"hold as many images as the prompt has {marker} markers, which is {num_markers}"
        raise InvalidRequest.refusing(path, must=must, found=str(len(images)))
    return prompt.with_images(images, marker)


def _decoded(encoded: str, path: str, limits: WireLimits) -> bytes:
    num_bytes = len(encoded) * 3 // 4 - encoded.count("=", len(encoded) - 2)
    check_amount(num_bytes, limits.max_image_bytes, path, must="be at most {} bytes")
    try:
        return binascii.a2b_base64(encoded, strict_mode=True)
    except ValueError as error:
        raise InvalidRequest.refusing(path, must=f"be {ALLOWED}", found=f"no base64: {error}") from None


def illustrated(
    prompts: tuple[Prompt, ...], images: Illustrations, *, name: str, limits: WireLimits
) -> tuple[Prompt, ...]:
    """Return the prompts with all of their images.

    images: of the one prompt, or a tuple for each;  name: of their parameter, as it was spelled

    Raises InvalidRequest where they are not as many as there are places for them, or more than one request may have.
    """
    if images and any(prompt.images for prompt in prompts):
        inside = 'be absent beside "multimodal_data", as both are the images of a prompt'
        raise InvalidRequest.refusing(name, must=inside, found="both")
    whole = _placed(prompts, images, name) if images else prompts
    num_images = sum(len(prompt.images) for prompt in whole)
    check_amount(num_images, limits.max_images, "prompt", must=f"{MOST_IMAGES} in all")
    return whole


def _placed(prompts: tuple[Prompt, ...], images: Illustrations, name: str) -> tuple[Prompt, ...]:
    num_prompts = len(prompts)
    if isinstance(images[0], Image):
        if num_prompts > 1:
            lists = f"be a list of lists, one for each of the {num_prompts} prompts"
            raise InvalidRequest.refusing(name, must=lists, found="a list of images")
        return (in_places(prompts[0], images, path=name),)
    if len(images) != num_prompts:
        lists = f"hold one list for each prompt, {num_prompts} in all"
        raise InvalidRequest.refusing(name, must=lists, found=str(len(images)))
    return tuple(
        in_places(prompt, own, path=f"{name}[{at}]")
        for at, (prompt, own) in enumerate(zip(prompts, images, strict=True))
    )
