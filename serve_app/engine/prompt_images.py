"""Writes what a model wants for an image into the text of a prompt, and finds its places among the tokens again."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

from serve_app.core.errors import InvalidRequest
from serve_app.core.images import Image
from serve_app.core.request import GenerationRequest, Prompt
from serve_app.engine.illustration import Illustration, illustrate
from serve_app.engine.vision.eyes import Eyes
from serve_app.engine.vision.seen import Seen


def spelled(prompt: Prompt, seen: Items[Seen], eyes: Eyes | None) -> Prompt:
    """The prompt with each image as the text that the model has for it; texts beside an image are one with it."""
    if not seen or eyes is None:
        return prompt
    return Prompt(parts=tuple(_joined(prompt, iter(seen), eyes)))


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
    return replace(request, prompt=Prompt(parts=(prompt.written,)))  # as an echo shows it


def _joined(prompt: Prompt, seen: Iterator[Seen], eyes: Eyes) -> Iterator[str | tuple[int, ...]]:
    """Its parts, of which those around an image are joined; others stay as they were tokenised, each by itself."""
    text, is_open = "", False
    for part in prompt.parts:
        match part:
            case Image():
                before, behind = ("", "") if part.marker == eyes.marker else eyes.around
                text, is_open = text + before + next(seen).text + behind, True
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
