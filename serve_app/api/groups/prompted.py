"""What is completed."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, InstanceOf

from serve_app.api.forms.form import Parameter
from serve_app.api.forms.images import Images
from serve_app.api.forms.prompts import Prompts
from serve_app.api.forms.shared import FLAG
from serve_app.core.prompt import Image, Prompt


class Prompted(BaseModel):
    """Prompts, each completed by itself.

    prompts: with every image in its place;  images: as they were sent beside them
    """

    prompts: Annotated[
        tuple[InstanceOf[Prompt], ...],
        Parameter(Prompts(), "What is completed; every prompt of a list by itself.", "prompt"),
    ]
    add_special_tokens: Annotated[
        bool, Parameter(FLAG, "Whether a prompt that begins with text gets the tokenizer's BOS before it.")
    ] = True
    images: Annotated[
        tuple[InstanceOf[Image], ...] | tuple[tuple[InstanceOf[Image], ...], ...],
        Parameter(Images(), "Images in the places of the `<image>` markers of the prompt, in their order."),
    ] = ()
