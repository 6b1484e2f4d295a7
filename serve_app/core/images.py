"""Images inside a prompt: bytes as a client sent them, where they stand, and what a model says of taking them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

MARKER = "<image>"
"""Where an image belongs in a text, whichever model reads it; each model's own marker takes its place."""
MEDIA_MARKER = "<__media__>"
"""The same as llama.cpp writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image; nothing of it is decoded before it reaches a replica.

    data:   a file of a kind that was recognised by its first bytes; empty once a replica has looked at it
    name:   the parameter it came in, as `images[0]`, for refusals
    marker: how its place was written in the text; the model's own marker means that whatever the model wants around an
            image is written there, too
    """

    data: bytes
    name: str
    marker: str = MARKER

    @property
    def digest(self) -> bytes:
        """The same for the same bytes."""
        return sha256(self.data).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCard:
    """What a model that has eyes says of images.

    marker: its own, as a chat template writes it
    reason: why it takes none here; None where it takes them
    """

    marker: str = MARKER
    reason: str | None = None

    @property
    def takes_images(self) -> bool:
        return self.reason is None
