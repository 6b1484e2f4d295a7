"""Tells the forms of `prompt` apart: text, token ids, both mixed, or a list of such prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.api.forms.numbers import TOKEN_ID, is_token_id
from serve_app.api.limits import WireLimits
from serve_app.api.shown import shown
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.request import Prompt

ALLOWED = (
    "a non-empty string, a list of token ids, a list of strings and token ids, or an object with a `prompt_string`"
)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Every form of `prompt`."""

    def words(self, terms: Terms) -> str:
        return (
            "a string, a list of token ids, a list that mixes both, or a list of at most"
            f" {terms.limits.max_prompts} such prompts"
        )

    def schema(self, terms: Terms) -> Schema:
        limits = terms.limits
        text = {"type": "string", "minLength": 1, "maxLength": limits.max_prompt_chars}
        element = {"anyOf": [TOKEN_ID, {"type": "string"}]}
        mixed = {"type": "array", "items": element, "minItems": 1, "maxItems": limits.max_prompt_ids}
        tagged = {
            "type": "object",
            "properties": {"prompt_string": {"anyOf": [text, mixed]}},
            "required": ["prompt_string"],
            "additionalProperties": False,
        }
        one = {"anyOf": [text, mixed, tagged]}
        several = {"type": "array", "items": one, "minItems": 1, "maxItems": limits.max_prompts}
        return {"anyOf": [text, mixed, tagged, several]}

    def read(self, value: Value) -> tuple[Prompt, ...]:
        return parse_prompts(value.sent, value.terms.limits)


def parse_prompts(value: object, limits: WireLimits) -> tuple[Prompt, ...]:
    """Every prompt that `value` holds, in order.

    A list with an integer at its top level is one prompt; any other list is a list of prompts. This is the
    rule of llama.cpp's tokenize_input_prompts. Booleans are no integers.

    Raises InvalidRequest that names the element.
    """
    if not isinstance(value, list) or int in set(map(type, value)):
        return (_parse_prompt(value, "prompt", limits),)
    if not value:
        raise InvalidRequest("`prompt` must not be empty; found [].", "prompt")
    if len(value) > limits.max_prompts:
        raise InvalidRequest(f"`prompt` must hold at most {limits.max_prompts} prompts; found {len(value)}.", "prompt")
    return tuple(_parse_prompt(element, f"prompt[{i}]", limits) for i, element in enumerate(value))


def _parse_prompt(value: object, path: str, limits: WireLimits) -> Prompt:
    match value:
        case str():
            return _text(value, path, limits)
        case list():
            return _list(value, path, limits)
        case dict() if "prompt_string" in value:
            return _object(value, path, limits)
        case _:
            raise InvalidRequest(f"`{path}` must be {ALLOWED}; found {shown(value)}.", path)


def _text(text: str, path: str, limits: WireLimits) -> Prompt:
    if not text:
        raise InvalidRequest(f'`{path}` must not be empty; found "".', path)
    _check_chars(len(text), path, limits)
    return Prompt(parts=(text,))


def _list(elements: list[object], path: str, limits: WireLimits) -> Prompt:
    if not elements:
        raise InvalidRequest(f"`{path}` must not be empty; found [].", path)
    kinds = set(map(type, elements))
    if kinds == {str}:
        raise InvalidRequest(f"`{path}` must be {ALLOWED}; found a list of strings inside the list of prompts.", path)
    if not kinds <= {int, str}:
        at, wrong = next((i, e) for i, e in enumerate(elements) if type(e) not in (int, str))
        raise InvalidRequest(
            f"`{path}[{at}]` must be a token id or a string, as the other elements of `{path}` are;"
            f" found {shown(wrong)}."
            if kinds & {int, str}
            else f"`{path}[{at}]` must be a token id; found {shown(wrong)}.",
            f"{path}[{at}]",
        )
    _check_chars(sum(len(e) for e in elements if isinstance(e, str)), path, limits)
    if len(elements) > limits.max_prompt_ids:
        raise InvalidRequest(
            f"`{path}` must hold at most {limits.max_prompt_ids} token ids; found {len(elements)}.", path
        )
    return Prompt(parts=_parts(elements, path))


def _object(members: dict[str, object], path: str, limits: WireLimits) -> Prompt:
    for name, value in members.items():
        if name == "prompt_string":
            continue
        if name == "multimodal_data":
            if value not in (None, []):
                raise UnsupportedParameter(
                    f"`{path}.multimodal_data` is not carried out by this server; send text only.",
                    f"{path}.multimodal_data",
                )
            continue
        raise InvalidRequest(f"`{path}` must have the member `prompt_string` alone; found {shown(name)}.", path)
    inner = members["prompt_string"]
    if isinstance(inner, str | list):
        return _parse_prompt(inner, f"{path}.prompt_string", limits)
    raise InvalidRequest(
        f"`{path}.prompt_string` must be a string or a list of strings and token ids; found {shown(inner)}.",
        f"{path}.prompt_string",
    )


def _parts(elements: Sequence[object], path: str) -> tuple[str | tuple[int, ...], ...]:
    """Strings one by one, as each is tokenized on its own; token ids in runs."""
    parts: list[str | tuple[int, ...]] = []
    run: list[int] = []
    for at, element in enumerate(elements):
        if isinstance(element, int):
            if not is_token_id(element):
                raise InvalidRequest(
                    f"`{path}[{at}]` must be a token id of the model's vocabulary; found {shown(element)}.",
                    f"{path}[{at}]",
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
        raise InvalidRequest(f"`{path}` must be at most {limits.max_prompt_chars} characters; found {num_chars}.", path)
