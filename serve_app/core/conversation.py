"""What a chat's prompt is made of: the messages as a client sent them, and the text that a template makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.images import Image


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
