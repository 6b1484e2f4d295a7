"""Tells the forms of `prompt` apart: text, token ids, both mixed, or a list of such prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.api.forms.images import images_schema, in_places, read_images
from serve_app.api.forms.numbers import TOKEN_ID, integral, is_token_id
from serve_app.api.limits import WireLimits
from serve_app.api.shown import shown
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import MARKER, MEDIA_MARKER, Prompt

ALLOWED = (
    'a non-empty string, a list of token ids, a list of strings and token ids, or an object with a "prompt_string"'
)
TEXT, IMAGES = "prompt_string", "multimodal_data"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Every form of `prompt`."""

    def words(self, terms: Terms) -> str:
        mixed = " a list that mixes both," if terms.dialect.takes_mixed_prompts else ""
        return f"a string, a list of token ids,{mixed} or a list of at most {terms.limits.max_prompts} such prompts"

    def schema(self, terms: Terms) -> Schema:
        limits = terms.limits
        text = {"type": "string", "minLength": 1, "maxLength": limits.max_prompt_chars}
        element = {"anyOf": [TOKEN_ID, {"type": "string"}]} if terms.dialect.takes_mixed_prompts else TOKEN_ID
        tokens = {  # a list of strings alone is a list of prompts
            "type": "array",
            "items": element,
            "contains": TOKEN_ID,
            "minItems": 1,
            "maxItems": limits.max_prompt_ids,
        }
        tagged = {
            "type": "object",
            "properties": {
                TEXT: {"anyOf": [text, tokens]},
                IMAGES: {"anyOf": [{"type": "null"}, images_schema(limits)]},
            },
            "required": [TEXT],
            "additionalProperties": False,
        }
        one = {"anyOf": [text, tokens, tagged]}
        several = {"type": "array", "items": one, "minItems": 1, "maxItems": limits.max_prompts}
        return {"anyOf": [text, tokens, tagged, several]}

    def read(self, value: Value) -> tuple[Prompt, ...]:
        return parse_prompts(value.sent, value.terms.limits)


def parse_prompts(
    value: object, limits: WireLimits, *, name: str = "prompt", max_prompts: int | None = None
) -> tuple[Prompt, ...]:
    """Every prompt that `value` holds, in order.

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
    """The same with whole numbers as integers; nothing is copied where none is written with a point."""
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
    """Strings one by one, as each is tokenized on its own; token ids in runs."""
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
    if num_chars > limits.max_prompt_chars:
        most = f"be at most {limits.max_prompt_chars} characters"
        raise InvalidRequest.refusing(path, must=most, found=str(num_chars))


def _empty(path: str, found: object) -> InvalidRequest:
    return InvalidRequest.refusing(path, must="not be empty", found=shown(found))


def _count(elements: list[object]) -> str:
    return f"{len(elements)} elements"
