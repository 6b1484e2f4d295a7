"""Forms of texts and token ids: prompts, predictions, lists of tokens, and what is added to their logits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve_app.api.error_text import shown
from serve_app.api.forms.form import TOKEN_ID, Terms, Value, check_amount, integral, is_token_id
from serve_app.api.forms.images import images_schema, in_places, read_images
from serve_app.api.forms.schema import (
    INTEGER,
    NUMBER,
    STRING,
    Schema,
    array,
    either,
    mapping,
    nullable,
    record,
    string,
    tagged,
)
from serve_app.api.limits import MAX_TOKEN_ID, WireLimits
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import MARKER, MEDIA_MARKER, Prompt

ALLOWED = (
    'a non-empty string, a list of token ids, a list of strings and token ids, or an object with a "prompt_string"'
)
TEXT, IMAGES = "prompt_string", "multimodal_data"


class Prompts:
    """Every form of `prompt`."""

    def words(self, terms: Terms) -> str:
        mixed = " a list that mixes both," if terms.dialect.takes_mixed_prompts else ""
        return f"a string, a list of token ids,{mixed} or a list of at most {terms.limits.max_prompts} such prompts"

    def schema(self, terms: Terms) -> Schema:
        limits = terms.limits
        text = string(least=1, most=limits.max_prompt_chars)
        element = either(TOKEN_ID, STRING) if terms.dialect.takes_mixed_prompts else TOKEN_ID
        tokens = {**array(element, least=1, most=limits.max_prompt_ids), "contains": TOKEN_ID}  # else a list of prompts
        illustrated = {IMAGES: nullable(images_schema(limits))}
        forms = text, tokens, record({TEXT: either(text, tokens)}, optional=illustrated, is_closed=True)
        return either(*forms, array(either(*forms), least=1, most=limits.max_prompts))

    def read(self, value: Value) -> tuple[Prompt, ...]:
        return parse_prompts(value.sent, value.terms.limits)


def parse_prompts(
    value: object, limits: WireLimits, *, name: str = "prompt", max_prompts: int | None = None
) -> tuple[Prompt, ...]:
    """Return every prompt that `value` holds, in order.

    name: of the parameter;  max_prompts: in place of the limit for prompts

    A list with an integer at its top level is one prompt; any other list is a list of prompts. This is the
    rule of llama.cpp's tokenize_input_prompts. Booleans are no integers, whole numbers are, however they are written.

    Raises InvalidRequest that names the element.
    """
    if not isinstance(value, list):
        return (_parse_prompt(value, name, limits),)
    elements = _with_integers(value)
    if int in set(map(type, elements)):
        return (_list(elements, name, limits),)
    if not elements:
        raise _empty(name, value)
    most = max_prompts or limits.max_prompts
    if len(elements) > most:
        raise InvalidRequest.refusing(name, must=f"hold at most {most} {name}s", found=_count(value))
    return tuple(_parse_prompt(element, f"{name}[{i}]", limits) for i, element in enumerate(elements))


def _parse_prompt(value: object, path: str, limits: WireLimits) -> Prompt:
    match value:
        case str():
            return _text(value, path, limits)
        case list():
            return _list(_with_integers(value), path, limits)
        case dict() if TEXT in value:
            return _object(value, path, limits)
        case _:
            raise InvalidRequest.refusing(path, must=f"be {ALLOWED}", found=shown(value))


def _with_integers(elements: list[object]) -> list[object]:
    """Return the list with whole numbers as integers; it is copied only if one is written with a point."""
    return list(map(integral, elements)) if float in set(map(type, elements)) else elements


def _text(text: str, path: str, limits: WireLimits) -> Prompt:
    if not text:
        raise _empty(path, text)
    _check_chars(len(text), path, limits)
    return Prompt(parts=(text,))


def _list(elements: list[object], path: str, limits: WireLimits) -> Prompt:
    if not elements:
        raise _empty(path, elements)
    kinds = set(map(type, elements))
    if kinds == {str}:
        raise InvalidRequest.refusing(path, must=f"be {ALLOWED}", found="a list of strings inside the list of prompts")
    if not kinds <= {int, str}:
        at, wrong = next((i, e) for i, e in enumerate(elements) if type(e) not in (int, str))
        others = f' or a string, as the other elements of "{path}" are' if kinds & {int, str} else ""
        raise InvalidRequest.refusing(f"{path}[{at}]", must=f"be a token id{others}", found=shown(wrong))
    _check_chars(sum(len(e) for e in elements if isinstance(e, str)), path, limits)
    if len(elements) > limits.max_prompt_ids:
        most = f"hold at most {limits.max_prompt_ids} token ids"
        raise InvalidRequest.refusing(path, must=most, found=_count(elements))
    return Prompt(parts=_parts(elements, path))


def _object(members: dict[str, object], path: str, limits: WireLimits) -> Prompt:
    for name in members:
        if name not in (TEXT, IMAGES):
            must = f'have the members "{TEXT}" and "{IMAGES}" alone'
            raise InvalidRequest.refusing(path, must=must, found=shown(name))
    inner = members[TEXT]
    if not isinstance(inner, str | list):
        raise InvalidRequest.refusing(
            f"{path}.{TEXT}", must="be a string or a list of strings and token ids", found=shown(inner)
        )
    prompt = _parse_prompt(inner, f"{path}.{TEXT}", limits)
    sent = members.get(IMAGES)
    if sent is None:
        return prompt
    if not isinstance(sent, list):
        raise InvalidRequest.refusing(f"{path}.{IMAGES}", must="be a list of images", found=shown(sent))
    images = read_images(sent, f"{path}.{IMAGES}", limits)
    marker = MEDIA_MARKER if prompt.count(MEDIA_MARKER) else MARKER
    return in_places(prompt, images, marker=marker, path=f"{path}.{IMAGES}")


def _parts(elements: Sequence[object], path: str) -> tuple[str | tuple[int, ...], ...]:
    """Return strings one by one, as each is tokenized on its own, and token ids in runs."""
    parts: list[str | tuple[int, ...]] = []
    run: list[int] = []
    for at, element in enumerate(elements):
        if isinstance(element, int):
            if not is_token_id(element):
                raise InvalidRequest.refusing(
                    f"{path}[{at}]", must="be a token id of the model's vocabulary", found=shown(element)
                )
            run.append(element)
        elif isinstance(element, str):
            if run:
                parts.append(tuple(run))
                run = []
            parts.append(element)
    if run:
        parts.append(tuple(run))
    return tuple(parts)


def _check_chars(num_chars: int, path: str, limits: WireLimits) -> None:
    check_amount(num_chars, limits.max_prompt_chars, path, must="be at most {} characters")


def _empty(path: str, found: object) -> InvalidRequest:
    return InvalidRequest.refusing(path, must="not be empty", found=shown(found))


def _count(elements: list[object]) -> str:
    return f"{len(elements)} elements"


MAX_BIAS = 100.0
NUMERIC = re.compile(r"-?[0-9]+")
MAX_DIGITS = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenList:
    """A list of token ids.

    max_ids:       how many it may hold
    is_needed:     whether an empty list is refused
    skips_null:    whether it may hold nulls, which are left out
    keeps_repeats: whether an id that comes again stays
    """

    max_ids: Callable[[Terms], int]
    is_needed: bool = False
    skips_null: bool = False
    keeps_repeats: bool = False

    def words(self, terms: Terms) -> str:
        return f"a list of {'1 to' if self.is_needed else 'at most'} {self.max_ids(terms)} token ids"

    def schema(self, terms: Terms) -> Schema:
        items = nullable(TOKEN_ID) if self.skips_null else TOKEN_ID
        return array(items, least=int(self.is_needed), most=self.max_ids(terms))

    def read(self, value: Value) -> tuple[int, ...]:
        elements = value.elements(self.max_ids(value.terms), self.words(value.terms), is_needed=self.is_needed)
        found = [
            _token_id(value, at, element)
            for at, element in enumerate(elements)
            if not (self.skips_null and element is None)
        ]
        return tuple(found if self.keeps_repeats else dict.fromkeys(found))


STOP_IDS = TokenList(max_ids=lambda terms: terms.limits.max_stop_token_ids, skips_null=True)
ALLOWED_IDS = TokenList(max_ids=lambda terms: terms.limits.max_logit_bias, is_needed=True)
"""As many as may be biased; of none of them nothing could be drawn."""
TEXT_IDS = TokenList(max_ids=lambda terms: terms.limits.max_prompt_ids, keeps_repeats=True)


class LogitBias:
    """An object or pairs, from a token id or a text whose tokens all get it; false is minus infinity."""

    def words(self, terms: Terms) -> str:
        return (
            f"an object or a list of pairs, at most {terms.limits.max_logit_bias} of them, from token ids or texts to"
            " numbers or false"
        )

    def schema(self, terms: Terms) -> Schema:
        most = terms.limits.max_logit_bias
        bias = either(NUMBER, {"const": False})
        key = either(INTEGER, STRING)  # of which vocabulary, the model says
        pair = {"type": "array", "prefixItems": [key, bias], "minItems": 2, "maxItems": 2}
        return either({**mapping(bias), "maxProperties": most}, array(pair, most=most))

    def read(self, value: Value) -> tuple[tuple[int | str, float], ...]:
        most = value.terms.limits.max_logit_bias
        if isinstance(value.sent, dict):
            if len(value.sent) > most:
                raise value.refused(self.words(value.terms))
            return tuple((_bias_key(key), _bias(value, key, bias)) for key, bias in value.sent.items() if key)
        pairs = (_pair(value, at, pair) for at, pair in enumerate(value.elements(most, self.words(value.terms))))
        return tuple(pair for pair in pairs if pair[0] != "")


def _token_id(value: Value, at: int, element: object) -> int:
    token_id = integral(element)
    if not is_token_id(token_id):
        raise value.part_refused(at, "a token id", element)
    return token_id


def _pair(value: Value, at: int, pair: object) -> tuple[int | str, float]:
    first = integral(pair[0]) if isinstance(pair, list) and len(pair) == 2 else None
    if not isinstance(pair, list) or isinstance(first, bool) or not isinstance(first, int | str):
        raise value.part_refused(at, "a pair of a token id or a text, and a number or false", pair)
    key = _bias_key(first) if isinstance(first, str) else max(-1, min(first, MAX_TOKEN_ID))
    return key, _bias(value, at, pair[1])


def _bias_key(key: str) -> int | str:
    """Return a numeric key as a token id; one that no vocabulary can have stays out of range."""
    if not NUMERIC.fullmatch(key):
        return key
    digits = key.lstrip("-0")[: MAX_DIGITS + 1] or "0"  # more of them are no other answer
    return max(-1, -int(digits)) if key.startswith("-") else min(int(digits), MAX_TOKEN_ID)


def _bias(value: Value, at: int | str, bias: object) -> float:
    if bias is False:
        return -math.inf
    if isinstance(bias, bool) or not isinstance(bias, int | float):
        raise value.part_refused(at, "a number or false", bias)
    return float(max(-MAX_BIAS, min(MAX_BIAS, bias)))


TYPE, CONTENT = "type", "content"


class Prediction:
    """`{"type": "content", "content": …}`, its content a string or a list of parts of text."""

    def words(self, terms: Terms) -> str:
        most = terms.limits.max_prompt_chars
        return (
            f'an object of the type "content" whose content is a string or a list of objects of the type "text", of at'
            f" most {most} characters together"
        )

    def schema(self, terms: Terms) -> Schema:
        text = string(most=terms.limits.max_prompt_chars)
        return tagged(CONTENT, {CONTENT: either(text, array(tagged("text", {"text": text})))})

    def read(self, value: Value) -> str:
        content = _member(value.sent, kind=CONTENT)
        texts = [_member(part, kind="text") for part in content] if isinstance(content, list) else [content]
        strings = [text for text in texts if isinstance(text, str)]
        is_whole = len(strings) == len(texts)
        if not is_whole or sum(map(len, strings)) > value.terms.limits.max_prompt_chars:
            raise value.refused(self.words(value.terms))
        return "".join(strings)


class Speculation:
    """A text, or a list of token ids."""

    def words(self, terms: Terms) -> str:
        return f"a string of at most {terms.limits.max_prompt_chars} characters or {TEXT_IDS.words(terms)}"

    def schema(self, terms: Terms) -> Schema:
        return either(string(most=terms.limits.max_prompt_chars), TEXT_IDS.schema(terms))

    def read(self, value: Value) -> str | tuple[int, ...]:
        if isinstance(value.sent, str) and len(value.sent) <= value.terms.limits.max_prompt_chars:
            return value.sent
        if not isinstance(value.sent, list):
            raise value.refused(self.words(value.terms))
        return TEXT_IDS.read(value)


def _member(sent: object, *, kind: str) -> object:
    """Return what is under the name of its own type; None if it is of another type."""
    return sent.get(kind) if isinstance(sent, dict) and sent.get(TYPE) == kind else None
