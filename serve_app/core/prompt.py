"""The parts of a prompt: text, token ids, images, a conversation to be rendered, the text behind a gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Everything that a model's chat template is given, none of it to be trusted.

    source: a JSON object of the template's variables, `messages` among them, characters as they are
    continues_last: the prompt ends inside the last message, behind its text
    name:   the parameter that the messages came in, for refusals
    images: in the order in which the template is to write their places
    """

    source: str
    continues_last: bool = False
    name: str = "messages"
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """The text of a prompt.

    foreign: where in it stand characters that did not come from the template and may be part of a special token's
             name, in rising order; no token that reaches over one of them may be special
    """

    text: str
    foreign: tuple[int, ...] = ()


class SuffixMode(StrEnum):
    """What is done with a suffix."""

    FIM = "fim"
    APPEND = "append"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraFile:
    """A file of the same project, or a piece of one."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """What a model that fills gaps is told beside the prompt, which stands before the gap.

    suffix:  the text behind the gap
    opening: how the text in the gap begins; it is not returned
    files:   for context, those that matter most last
    """

    suffix: str
    opening: str = ""
    files: tuple[ExtraFile, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.suffix, self.opening, *(text for file in self.files for text in (file.name, file.text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A text to be cut into tokens.

    adds_special:   with the tokens that the tokenizer puts in front of a prompt
    parses_special: special tokens written out in the text are such; otherwise they are text
    with_pieces:    also the bytes of each token
    conversation:   what the text is rendered of, where that is asked for; the text is empty then
    param:          what the client calls it
    """

    text: str = ""
    adds_special: bool = False
    parses_special: bool = True
    with_pieces: bool = False
    conversation: Conversation | None = None
    param: str = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenization:
    """pieces: of each token, where they were asked for; else None
    text:   of a conversation, what was rendered of it
    """

    token_ids: tuple[int, ...]
    pieces: tuple[bytes, ...] | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Text, token ids and images in their order. A leading text part gets the tokenizer's BOS, later ones do not.

    Images and the texts beside them are one text, in which what the model wants for an image stands in its place.

    adds_special: False: nor does the leading one
    foreign:      of a prompt of one text, markers of images included: where in it no special token may reach, see
                  `Rendering`
    """

    parts: tuple[str | tuple[int, ...] | Image, ...]
    adds_special: bool = True
    foreign: tuple[int, ...] = ()

    @property
    def text(self) -> str | None:
        """The prompt as text where it is nothing but text, else None."""
        if len(self.parts) == 1 and isinstance(self.parts[0], str):
            return self.parts[0]
        return None

    @property
    def num_chars(self) -> int:
        """Characters of its texts together."""
        return sum(len(part) for part in self.parts if isinstance(part, str))

    @property
    def num_ids(self) -> int:
        """Token ids that it gives itself."""
        return sum(len(part) for part in self.parts if isinstance(part, tuple))

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image))

    def count(self, marker: str) -> int:
        """Return how often an image marker stands in the texts."""
        return sum(part.count(marker) for part in self.parts if isinstance(part, str))

    def with_images(self, images: Sequence[Image], marker: str) -> Prompt:
        """Return the same prompt with the images in place of their markers, of which there are as many."""
        assert self.count(marker) == len(images), "as many images as markers"
        waiting = iter(images)
        parts: list[str | tuple[int, ...] | Image] = []
        for part in self.parts:
            first, *rest = part.split(marker) if isinstance(part, str) else (part,)
            parts.append(first)
            for text in rest:
                parts += [replace(next(waiting), marker=marker), text]
        return Prompt(parts=tuple(part for part in parts if part != ""))

    @property
    def written(self) -> str:
        """Its texts with a marker for each image, as they were sent; nothing of token ids."""
        texts = (part.marker if isinstance(part, Image) else part for part in self.parts)
        return "".join(text for text in texts if isinstance(text, str))
