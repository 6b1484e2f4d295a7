"""Text in tokens outside of completions: what is asked for, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.conversation import Conversation


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
