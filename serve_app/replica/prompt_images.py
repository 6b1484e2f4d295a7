"""Writes what a model wants for an image into the text of a prompt, and finds its places among the tokens again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Conversation, Image, Prompt, Rendering
from serve_app.core.request import GenerationRequest
from serve_app.engine.vision.eyes import Eyes
from serve_app.engine.vision.illustration import Illustration, illustrate
from serve_app.engine.vision.seen import Seen


def spelled(prompt: Prompt, seen: Items[Seen], eyes: Eyes | None) -> Prompt:
    """The prompt with each image as the text that the model has for it; texts beside an image are one with it."""
    if not seen or eyes is None:
        return prompt
    texts = [_text(image, each, eyes) for image, each in zip(prompt.images, seen, strict=True)]
    parts = tuple(_joined(prompt, iter(texts)))
    return replace(prompt, parts=parts, foreign=tuple(_moved(prompt, texts)))


def placed(conversation: Conversation, rendering: Rendering, eyes: Eyes | None) -> Prompt:
    """A rendered conversation with its images where the template, and nobody else, wrote the model's marker.

    Raises InvalidRequest where these places are not as many as the images.
    """
    text, images = rendering.text, conversation.images
    prompt = Prompt(parts=(text,), adds_special=False, foreign=rendering.foreign)
    if not images or eyes is None:
        return prompt
    starts = [place for place in _starts(text, eyes.marker) if not _is_foreign(rendering, place, len(eyes.marker))]
    if len(starts) != len(images):
        must = f"hold as many images as the model's chat template writes places for, which are {len(starts)}"
        raise InvalidRequest.refusing(conversation.name, must=must, found=str(len(images)))
    parts: list[str | Image] = []
    done = 0
    for start, image in zip(starts, images, strict=True):
        parts += [text[done:start], replace(image, marker=eyes.marker)]
        done = start + len(eyes.marker)
    return replace(prompt, parts=tuple(part for part in (*parts, text[done:]) if part != ""))


def illustrated(token_ids: Items[int], seen: Items[Seen], eyes: Eyes | None) -> Illustration | None:
    """What the prompt's sequences hold of its images; None where it has none.

    Raises InvalidRequest where the prompt itself has the token that stands for images.
    """
    if eyes is None or (not seen and eyes.token_id not in token_ids):
        return None
    found = illustrate(token_ids, seen, token_id=eyes.token_id) if seen else None
    if found is None:
        raise InvalidRequest.refusing(
            "prompt",
            must=f"have an image for every {eyes.marker}, which this model has for images",
            found=f"{len(seen)} images and more places" if seen else "a place and no image",
        )
    return found


def without_files(request: GenerationRequest) -> GenerationRequest:
    """The same without the bytes of its images, which nobody needs any more."""
    prompt = request.prompt
    if not prompt.images:
        return request
    if any(isinstance(part, tuple) for part in prompt.parts):
        parts = tuple(replace(part, data=b"") if isinstance(part, Image) else part for part in prompt.parts)
        return replace(request, prompt=Prompt(parts=parts))
    written = Prompt(parts=(prompt.written,), adds_special=prompt.adds_special)
    return replace(request, prompt=written)  # as an echo shows it


def _text(image: Image, seen: Seen, eyes: Eyes) -> str:
    """What stands for an image; what is around it, too, unless the model's own marker says that it is there already."""
    before, behind = ("", "") if image.marker == eyes.marker else eyes.around
    return before + seen.text + behind


def _joined(prompt: Prompt, texts: Iterator[str]) -> Iterator[str | tuple[int, ...]]:
    """Its parts, of which those around an image are joined; others stay as they were tokenised, each by itself."""
    text, is_open = "", False
    for part in prompt.parts:
        match part:
            case Image():
                text, is_open = text + next(texts), True
            case str() if is_open or not text:
                text, is_open = text + part, False
            case _:
                if text:
                    yield text
                text, is_open = (part, False) if isinstance(part, str) else ("", False)
                if not isinstance(part, str):
                    yield part
    if text:
        yield text


def _moved(prompt: Prompt, texts: Items[str]) -> Iterator[int]:
    """Where foreign characters come to stand when a text is there for each marker."""
    places: list[tuple[int, int]] = []  # the place of a marker, and what its text adds
    num_chars, waiting = 0, iter(texts)
    for part in prompt.parts:
        if isinstance(part, Image):
            places.append((num_chars, len(next(waiting)) - len(part.marker)))
        num_chars += len(part.marker) if isinstance(part, Image) else len(part)
    for place in prompt.foreign:
        yield place + sum(added for start, added in places if start < place)


def _starts(text: str, marker: str) -> Iterator[int]:
    place = text.find(marker)
    while place >= 0:
        yield place
        place = text.find(marker, place + len(marker))


def _is_foreign(rendering: Rendering, start: int, length: int) -> bool:
    at = bisect_left(rendering.foreign, start)
    return at < len(rendering.foreign) and rendering.foreign[at] < start + length
