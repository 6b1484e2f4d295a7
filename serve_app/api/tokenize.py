"""The bodies of POST /tokenize and POST /detokenize, in llama.cpp's and vLLM's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from serve_app.api.json_body import read_json_object
from serve_app.api.limits import MAX_TOKEN_ID, WireLimits
from serve_app.api.shown import shown
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.tokenization import Tokenization, TokenizeRequest

TEXT_NAMES = ("content", "prompt")
SPECIAL_NAMES = ("add_special", "add_special_tokens")
TOKENIZE_NAMES = (
    "model", *TEXT_NAMES, *SPECIAL_NAMES, "parse_special", "with_pieces", "return_token_strs"
)  # fmt: skip
DETOKENIZE_NAMES = ("model", "tokens")
Kind = TypeVar("Kind", str, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCall:
    """model: None is the only one served;  returns_strings: vLLM's `token_strs`"""

    model: str | None
    request: TokenizeRequest
    has_pieces: bool
    returns_strings: bool

    def answer(self, found: Tokenization, *, max_model_len: int) -> dict[str, object]:
        """llama.cpp's `tokens` with vLLM's `count` and `max_model_len` beside them."""
        tokens: list[object] = list(found.token_ids)
        if self.has_pieces and found.pieces is not None:
            pieces = zip(found.token_ids, found.pieces, strict=True)
            tokens = [{"id": token_id, "piece": _piece(piece)} for token_id, piece in pieces]
        body: dict[str, object] = {"tokens": tokens, "count": len(tokens), "max_model_len": max_model_len}
        if self.returns_strings and found.pieces is not None:
            body["token_strs"] = [piece.decode("utf-8", "replace") for piece in found.pieces]
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeCall:
    """model: None is the only one served"""

    model: str | None
    token_ids: tuple[int, ...]


def parse_tokenize(body: bytes, limits: WireLimits) -> TokenizeCall:
    """`content` is llama.cpp's, without special tokens unless asked; `prompt` is vLLM's, with them.

    Raises InvalidRequest.
    """
    members = _members(body, TOKENIZE_NAMES, limits, route="/tokenize")
    sent = [name for name in TEXT_NAMES if name in members]
    if len(sent) != 1:
        found = "both" if sent else "neither"
        raise InvalidRequest(f"`content` or `prompt` is required, a string; found {found}.", "content")
    text = _typed(members, sent[0], str, "a string")
    assert text is not None
    if len(text) > limits.max_prompt_chars:
        raise InvalidRequest(
            f"`{sent[0]}` must be at most {limits.max_prompt_chars} characters; found {len(text)}.", sent[0]
        )
    if len([name for name in SPECIAL_NAMES if name in members]) > 1:
        raise InvalidRequest(
            "`add_special` and `add_special_tokens` are one parameter; send one of them.", "add_special_tokens"
        )
    adds_special = [_typed(members, name, bool, "a boolean") for name in SPECIAL_NAMES if name in members]
    parses_special = _typed(members, "parse_special", bool, "a boolean")
    has_pieces = bool(_typed(members, "with_pieces", bool, "a boolean"))
    returns_strings = bool(_typed(members, "return_token_strs", bool, "a boolean"))
    return TokenizeCall(
        model=_typed(members, "model", str, "a string"),
        request=TokenizeRequest(
            text=text,
            adds_special=bool(adds_special[0]) if adds_special else sent[0] == "prompt",
            parses_special=parses_special is not False,
            with_pieces=has_pieces or returns_strings,
        ),
        has_pieces=has_pieces,
        returns_strings=returns_strings,
    )


def parse_detokenize(body: bytes, limits: WireLimits) -> DetokenizeCall:
    """Raises InvalidRequest."""
    members = _members(body, DETOKENIZE_NAMES, limits, route="/detokenize")
    allowed = f"a list of at most {limits.max_prompt_ids} token ids"
    tokens = members.get("tokens")
    if not isinstance(tokens, list):
        raise InvalidRequest(f"`tokens` is required, {allowed}; found {shown(tokens)}.", "tokens")
    if len(tokens) > limits.max_prompt_ids:
        raise InvalidRequest(f"`tokens` must be {allowed}; found {len(tokens)}.", "tokens")
    for at, token_id in enumerate(tokens):
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidRequest(f"`tokens[{at}]` must be a token id; found {shown(token_id)}.", f"tokens[{at}]")
    return DetokenizeCall(model=_typed(members, "model", str, "a string"), token_ids=tuple(tokens))


def detokenized(text: str) -> dict[str, object]:
    """The same under both systems' names."""
    return {"content": text, "prompt": text}


def _members(body: bytes, names: tuple[str, ...], limits: WireLimits, *, route: str) -> dict[str, object]:
    """The members that are not null. Raises UnsupportedParameter for one of them that has none of these names."""
    sent = read_json_object(body, max_depth=limits.max_depth)
    members = {name: value for name, value in sent.items() if value is not None}
    for name in members:
        if name not in names:
            raise UnsupportedParameter(
                f"`{name[:100]}` is not a parameter of {route}; those are {', '.join(names)}.", name[:100]
            )
    return members


def _typed(members: Mapping[str, object], name: str, kind: type[Kind], allowed: str) -> Kind | None:
    value = members.get(name)
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"`{name}` must be {allowed}; found {shown(value)}.", name)
    return value


def _piece(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are no whole characters."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
