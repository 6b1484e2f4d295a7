"""The messages of a chat: roles, texts and what belongs to them, as a chat template is given them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.api.forms.images import images_schema, read_image
from serve_app.api.json_body import check_depth
from serve_app.api.limits import WireLimits
from serve_app.api.shown import shown
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.images import Image

Message = dict[str, Any]
MAX_DEPTH = 64
"""Of arguments that come as text."""
ROLES = ("system", "developer", "user", "assistant", "tool")
NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string"}
PART_TYPES = ("text", "refusal")
TEXT_PART: Schema = {
    "anyOf": [
        {
            "type": "object",
            "required": ["type", kind],
            "properties": {"type": {"const": kind}, kind: TEXT},
        }
        for kind in PART_TYPES
    ]
}
CONTENT: Schema = {"anyOf": [TEXT, {"type": "array", "items": TEXT_PART}]}
IMAGE = "image_url"
OTHER_PARTS = (IMAGE, "image", "input_audio", "video_url", "file")
"""Parts that are not read, or not in every message."""
TOOL_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"anyOf": [TEXT, NULL]},
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "arguments": {"anyOf": [{"type": "object"}, {**TEXT, "contentMediaType": "application/json"}, NULL]},
            },
        },
    },
}


@dataclass(frozen=True, slots=True)
class Messages:
    """A list of messages, the oldest first. Members that are no template's business are left out."""

    def words(self, terms: Terms) -> str:
        return (
            f"a list of 1 to {terms.limits.max_messages} messages, each an object of a"
            f' "role" ({", ".join(ROLES)}) and a "content"'
        )

    def schema(self, terms: Terms) -> Schema:
        named: Schema = {"name": {"anyOf": [TEXT, NULL]}}
        parts = {"anyOf": [*TEXT_PART["anyOf"], _image_part(terms)]}
        content: Schema = {"anyOf": [TEXT, {"type": "array", "items": parts}]}
        plain = _message(ROLES[:3], {"content": content, **named}, ["content"])
        tool = _message(["tool"], {"content": content, "tool_call_id": {"anyOf": [TEXT, NULL]}, **named}, ["content"])
        silent = {"anyOf": [*CONTENT["anyOf"], NULL]}
        extras = {"reasoning_content": {"anyOf": [TEXT, NULL]}, **named}
        calls = {"type": "array", "items": TOOL_CALL}
        says = _message(
            ["assistant"], {"content": silent, "tool_calls": {"anyOf": [calls, NULL]}, **extras}, ["content"]
        )
        asks = _message(
            ["assistant"], {"content": silent, "tool_calls": {**calls, "minItems": 1}, **extras}, ["tool_calls"]
        )
        items = {"anyOf": [plain, tool, says, asks]}
        return {"type": "array", "items": items, "minItems": 1, "maxItems": terms.limits.max_messages}

    def read(self, value: Value) -> tuple[Message, ...]:
        terms = value.terms
        sent = value.elements(terms.limits.max_messages, self.words(terms))
        if not sent:
            raise value.refused(self.words(terms))
        messages = tuple(_read(each, f"{value.name}[{at}]", terms.limits) for at, each in enumerate(sent))
        num_images = len(images_of(messages))
        if num_images > terms.limits.max_images:
            most = f"hold at most {terms.limits.max_images} images"
            raise InvalidRequest.refusing(value.name, must=most, found=str(num_images))
        num_chars = sum(map(_num_chars, messages))
        if num_chars > terms.limits.max_prompt_chars:
            most = f"hold at most {terms.limits.max_prompt_chars} characters"
            raise InvalidRequest.refusing(value.name, must=most, found=str(num_chars))
        return messages


def images_of(messages: Iterable[Message]) -> tuple[Image, ...]:
    """Those of all messages, in their order."""
    contents = (message["content"] for message in messages)
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return tuple(part[IMAGE] for part in parts if part["type"] == "image")


def _num_chars(message: Message) -> int:
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return sum(map(len, texts)) + sum(len(str(member)) for name, member in message.items() if name != "content")


def _image_part(terms: Terms) -> Schema:
    url = images_schema(terms.limits)["items"]
    inner = {"type": "object", "required": ["url"], "properties": {"url": url}}
    image: Schema = {"anyOf": [url, inner]}
    return {
        "type": "object",
        "required": ["type", IMAGE],
        "properties": {"type": {"const": IMAGE}, IMAGE: image},
    }


@dataclass(frozen=True, slots=True)
class TemplateVariables:
    """An object of further variables for the chat template."""

    taken: frozenset[str]

    def words(self, terms: Terms) -> str:
        return f"an object of variables for the chat template, none of them {', '.join(sorted(self.taken))}"

    def schema(self, terms: Terms) -> Schema:
        return {"type": "object", "properties": {name: {"not": {}} for name in sorted(self.taken)}}

    def read(self, value: Value) -> dict[str, object]:
        if not isinstance(value.sent, dict) or self.taken & value.sent.keys():
            raise value.refused(self.words(value.terms))
        limit = value.terms.limits.max_constraint_chars
        num_chars = len(json.dumps(value.sent, ensure_ascii=False))
        if num_chars > limit:
            raise InvalidRequest.refusing(value.name, must=f"have at most {limit} characters", found=str(num_chars))
        return value.sent


@dataclass(frozen=True, slots=True)
class Documents:
    """A list of objects, which are for the chat template to read."""

    def words(self, terms: Terms) -> str:
        return f"a list of objects, of at most {terms.limits.max_constraint_chars} characters together"

    def schema(self, terms: Terms) -> Schema:
        return {"type": "array", "items": {"type": "object"}}

    def read(self, value: Value) -> list[dict[str, object]]:
        if not isinstance(value.sent, list) or not all(isinstance(each, dict) for each in value.sent):
            raise value.refused(self.words(value.terms))
        limit, num_chars = value.terms.limits.max_constraint_chars, len(json.dumps(value.sent, ensure_ascii=False))
        if num_chars > limit:
            raise InvalidRequest.refusing(value.name, must=f"have at most {limit} characters", found=str(num_chars))
        return value.sent


def _message(roles: tuple[str, ...] | list[str], members: Mapping[str, Schema], required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": {"role": {"enum": list(roles)}, **members},
        "required": ["role", *required],
    }


def _read(sent: object, path: str, limits: WireLimits) -> Message:
    role = sent.get("role") if isinstance(sent, dict) else None
    if not isinstance(sent, dict) or role not in ROLES:
        raise _refused(path, f'an object whose "role" is one of {", ".join(ROLES)}', sent)
    message: Message = {"role": role, "content": ""}
    calls = sent.get("tool_calls") if role == "assistant" else None
    content = sent.get("content")
    may_be_silent = role == "assistant" and (calls or "content" in sent)
    if content is not None or not may_be_silent:
        message["content"] = _content(content, f"{path}.content", limits if role != "assistant" else None)
    for name in ("name", "tool_call_id", "reasoning_content"):
        if sent.get(name) is not None and _has(role, name):
            message[name] = _text(sent[name], f"{path}.{name}")
    if calls is not None:
        message["tool_calls"] = _calls(calls, f"{path}.tool_calls")
    return message if message.get("tool_calls") != [] else {k: v for k, v in message.items() if k != "tool_calls"}


def _has(role: str, name: str) -> bool:
    """Whether messages of that role have such a member."""
    return {"tool_call_id": "tool", "reasoning_content": "assistant"}.get(name, role) == role


def _content(sent: object, path: str, limits: WireLimits | None) -> str | list[Message]:
    """A text, or the texts of its parts, each on a line of its own; with images all parts as they are.

    limits: of images; None takes none
    """
    if isinstance(sent, str):
        return sent
    if not isinstance(sent, list):
        raise _refused(path, "a string or a list of parts", sent)
    parts = [_part(part, f"{path}[{at}]", limits) for at, part in enumerate(sent)]
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(sent: object, path: str, limits: WireLimits | None) -> Message:
    kind = sent.get("type") if isinstance(sent, dict) else None
    if isinstance(sent, dict) and kind in PART_TYPES:
        return {"type": "text", "text": _text(sent.get(kind), f"{path}.{kind}")}
    if isinstance(sent, dict) and kind == IMAGE and limits is not None:
        return {"type": "image", IMAGE: _image(sent.get(IMAGE), f"{path}.{IMAGE}", limits)}
    if kind in OTHER_PARTS:
        raise UnsupportedParameter.refusing(
            f"{path}.type", must=f'be "text" or, of who asks, "{IMAGE}"', found=shown(kind)
        )
    raise _refused(path, 'an object whose "type" is "text", with a "text"', sent)


def _image(sent: object, path: str, limits: WireLimits) -> Image:
    if isinstance(sent, dict):
        return read_image(sent.get("url"), f"{path}.url", limits)
    return read_image(sent, path, limits)


def _calls(sent: object, path: str) -> list[Message]:
    if not isinstance(sent, list):
        raise _refused(path, "a list of calls of functions", sent)
    return [_call(call, f"{path}[{at}]") for at, call in enumerate(sent)]


def _call(sent: object, path: str) -> Message:
    function = sent.get("function") if isinstance(sent, dict) else None
    is_call = isinstance(sent, dict) and sent.get("type") in ("function", None)
    if not is_call or not isinstance(function, dict) or not isinstance(sent, dict):
        raise _refused(path, 'an object of "type" "function" with a "function"', sent)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _refused(f"{path}.function.name", "a non-empty string", name)
    arguments = _arguments(function.get("arguments"), f"{path}.function.arguments")
    call: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if sent.get("id") is not None:
        call = {"id": _text(sent["id"], f"{path}.id"), **call}
    return call


def _arguments(sent: object, path: str) -> dict[str, object]:
    """An object, as templates expect it, also where it came as OpenAI's text of JSON."""
    found: object = {} if sent is None or sent == "" else sent
    if isinstance(found, str):
        try:
            found = json.loads(found)
            check_depth(found, MAX_DEPTH)
        except (ValueError, RecursionError, InvalidRequest):
            found = None
    if not isinstance(found, dict):
        raise _refused(path, "an object, or JSON of one in a string", sent)
    return found


def _text(sent: object, path: str) -> str:
    if not isinstance(sent, str):
        raise _refused(path, "a string", sent)
    return sent


def _refused(path: str, allowed: str, found: object) -> InvalidRequest:
    return InvalidRequest.refusing(path, must=f"be {allowed}", found=shown(found))
