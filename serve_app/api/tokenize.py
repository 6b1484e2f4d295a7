"""The bodies of POST /tokenize and POST /detokenize, in llama.cpp's and vLLM's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from serve_app.api.chat import Conversed, check_continuation, conversation_of
from serve_app.api.forms.form import FLAG, Parameter, Text
from serve_app.api.forms.prompts import TEXT_IDS
from serve_app.api.groups import Calling
from serve_app.api.limits import WireLimits
from serve_app.api.parameters import declared
from serve_app.api.parse import read_members
from serve_app.api.paths import Path
from serve_app.core.cards import ModelCard
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Tokenization, TokenizeRequest
from serve_app.core.tools import Tool

TEXT = Text(max_chars=lambda terms: terms.limits.max_prompt_chars)
MODEL = Parameter(Text(), "A model or an adapter; the only one where one is served.")
CONVERSED: Mapping[str, Parameter] = {
    **{name: each for name, each in declared(Conversed).items() if name != "separate_reasoning"},
    "tools": declared(Calling)["tools"],
}
ADD_SPECIAL = "Whether special tokens like the beginning of text are added."
TOKENIZE: Mapping[str, Parameter] = {
    "model": MODEL,
    "content": Parameter(TEXT, "llama.cpp's name; without special tokens unless asked for."),
    "prompt": Parameter(TEXT, "vLLM's name; with special tokens unless refused."),
    **CONVERSED,
    "add_special": Parameter(FLAG, ADD_SPECIAL),
    "add_special_tokens": Parameter(FLAG, ADD_SPECIAL),
    "parse_special": Parameter(FLAG, "Whether the text of a special token is that token."),
    "with_pieces": Parameter(FLAG, "Every token comes with its piece of the text."),
    "return_token_strs": Parameter(FLAG, "The pieces come in a list of their own."),
}
TEXT_NAMES = ("content", "prompt", "messages")
"""What is cut into tokens, under one of these names."""
APPLY_TEMPLATE: Mapping[str, Parameter] = {"model": MODEL, **CONVERSED}
SPECIAL_NAMES = ("add_special", "add_special_tokens")
"""Names of one parameter, of which one may be sent."""
DETOKENIZE: Mapping[str, Parameter] = {
    "model": MODEL,
    "tokens": Parameter(TEXT_IDS, "The tokens whose text is asked for."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCall:
    """model: None is the only one served;  returns_strings: vLLM's `token_strs`"""

    model: str | None
    request: TokenizeRequest
    has_pieces: bool = False
    returns_strings: bool = False
    conversed: Conversed | None = None
    tools: tuple[Tool, ...] = ()

    def request_to(self, card: ModelCard) -> TokenizeRequest:
        """Return what this model is asked."""
        if self.conversed is None:
            return self.request
        return replace(self.request, conversation=conversation_of(self.conversed, card, tools=self.tools))

    def answer(self, found: Tokenization, *, max_model_len: int) -> dict[str, object]:
        """Return llama.cpp's `tokens` with vLLM's `count` and `max_model_len`."""
        tokens: list[object] = list(found.token_ids)
        if self.has_pieces and found.pieces is not None:
            pieces = zip(found.token_ids, found.pieces, strict=True)
            tokens = [{"id": token_id, "piece": _piece(piece)} for token_id, piece in pieces]
        body: dict[str, object] = {"tokens": tokens, "count": len(tokens), "max_model_len": max_model_len}
        if self.returns_strings and found.pieces is not None:
            body["token_strs"] = [piece.decode("utf-8", "replace") for piece in found.pieces]
        return body


def parse_tokenize(body: bytes, limits: WireLimits) -> TokenizeCall:
    """`content` is llama.cpp's, without special tokens unless asked; `prompt` is vLLM's, with them; `messages` are
    a chat, whose template writes them itself.

    Raises InvalidRequest.
    """
    values = read_members(body, TOKENIZE, limits, path=Path.TOKENIZE)
    sent = [name for name in TEXT_NAMES if name in values]
    if len(sent) != 1:
        must = 'be a string, or else "prompt" or "messages"'
        raise InvalidRequest.refusing("content", must=must, found=" and ".join(sent) or "none of them")
    conversed = _conversed(values, beside=sent[0])
    if all(name in values for name in SPECIAL_NAMES):
        one, other = SPECIAL_NAMES
        raise InvalidRequest.refusing(
            other, must=f'be absent beside "{one}", as both are names of one parameter', found="both"
        )
    adds_special = values.get("add_special", values.get("add_special_tokens", "prompt" in values))
    has_pieces, returns_strings = values.get("with_pieces", False), values.get("return_token_strs", False)
    return TokenizeCall(
        model=values.get("model"),
        request=TokenizeRequest(
            text="" if conversed is not None else values[sent[0]],
            adds_special=adds_special,
            parses_special=values.get("parse_special", True),
            with_pieces=has_pieces or returns_strings,
            param=sent[0],
        ),
        has_pieces=has_pieces,
        returns_strings=returns_strings,
        conversed=conversed,
        tools=values.get("tools", ()),
    )


def parse_apply_template(body: bytes, limits: WireLimits) -> TokenizeCall:
    """Return the chat whose prompt is asked for. Raises InvalidRequest."""
    values = read_members(body, APPLY_TEMPLATE, limits, path=Path.APPLY_TEMPLATE, required="messages")
    conversed = _conversed(values, beside="messages")
    request, tools = TokenizeRequest(), values.get("tools", ())
    return TokenizeCall(model=values.get("model"), request=request, conversed=conversed, tools=tools)


def _conversed(values: Mapping[str, Any], *, beside: str) -> Conversed | None:
    """Return the chat that these members make; None if they are of a text."""
    members = {name: values[name] for name in CONVERSED if name in values}
    if beside == "messages":
        check_continuation(members)
        return Conversed.model_validate({name: value for name, value in members.items() if name != "tools"})
    if members:
        name = next(iter(members))
        raise InvalidRequest.refusing(name, must=f'be absent beside "{beside}", as it is of chats', found="both")
    return None


def parse_detokenize(body: bytes, limits: WireLimits) -> tuple[str | None, tuple[int, ...]]:
    """Return the model, None for the only one served, and the token ids. Raises InvalidRequest."""
    values = read_members(body, DETOKENIZE, limits, path=Path.DETOKENIZE, required="tokens")
    return values.get("model"), values["tokens"]


def detokenized(text: str) -> dict[str, object]:
    """Return the text under both systems' names."""
    return {"content": text, "prompt": text}


def _piece(piece: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if they are no whole characters."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
