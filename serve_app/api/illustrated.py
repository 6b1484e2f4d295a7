"""Puts the images that were sent beside prompts into their places."""

from __future__ import annotations

from serve_app.api.forms.images import Illustrations, in_places
from serve_app.api.limits import WireLimits
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Image, Prompt


def illustrated(
    prompts: tuple[Prompt, ...], images: Illustrations, *, name: str, limits: WireLimits
) -> tuple[Prompt, ...]:
    """The prompts with all of their images.

    images: of the one prompt, or a tuple for each;  name: of their parameter, as it was spelled

    Raises InvalidRequest where they are not as many as there are places for them, or more than one request may have.
    """
    if images and any(prompt.images for prompt in prompts):
        inside = 'be absent beside "multimodal_data", as both are the images of a prompt'
        raise InvalidRequest.refusing(name, must=inside, found="both")
    whole = _placed(prompts, images, name) if images else prompts
    num_images = sum(len(prompt.images) for prompt in whole)
    if num_images > limits.max_images:
        most = f"hold at most {limits.max_images} images in all"
        raise InvalidRequest.refusing("prompt", must=most, found=str(num_images))
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
