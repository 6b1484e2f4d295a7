"""Forms of chats: messages with their parts, tools, and the choice among them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.api.error_text import shown
from serve_app.api.forms.form import Terms, Value, check_amount
from serve_app.api.forms.images import MOST_IMAGES, images_schema, read_image
from serve_app.api.forms.schema import BOOLEAN, OBJECT, STRING, Schema, array, either, nullable, record, string, tagged
from serve_app.api.limits import WireLimits
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.prompt import Image
from serve_app.core.tools import Tool, ToolChoice

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
ASKING = ("system", "developer", "user", "tool")
"""Roles whose messages always have a content."""
REASONING = ("reasoning_content", "thinking", "reasoning")
TEXTS = ("name", "tool_call_id", *REASONING)
"""Members that are strings where they are there."""
PART_TYPES = ("text", "refusal")
TEXT_PARTS = [tagged(kind, {kind: STRING}) for kind in PART_TYPES]
CONTENT = [STRING, array(either(*TEXT_PARTS))]
IMAGE = "image_url"
MEDIA = ("image", "audio", "video", "file")
"""Words of parts that are not read, or not in every message."""
ARGUMENTS = nullable(OBJECT, {**STRING, "contentMediaType": "application/json"})
TOOL_CALL = record(
    {"function": record({"name": string(least=1)}, optional={"arguments": ARGUMENTS})},
    optional={"id": nullable(STRING), "type": {"enum": ["function", None]}},
)


class Messages:
    """A list of messages, the oldest first, as they were sent."""

    def words(self, terms: Terms) -> str:
        return (
            f"a list of 1 to {terms.limits.max_messages} messages, each an object of a"
            f' "role" ({", ".join(ROLES)}) and a "content"'
        )

    def schema(self, terms: Terms) -> Schema:
        content = [STRING, array(either(*TEXT_PARTS, _image_part(terms)))]
        others = {**dict.fromkeys(TEXTS, nullable(STRING)), "tool_calls": nullable(array(TOOL_CALL))}
        silent = {"content": nullable(*CONTENT)}
        assistant = {"role": {"const": "assistant"}}
        demanded = {"tool_calls": array(TOOL_CALL, least=1), **dict.fromkeys(REASONING, STRING)}
        kinds = (
            record({"role": {"enum": list(ASKING)}, "content": either(*content)}, optional=others),
            record(assistant | silent, optional=others),
            *(record({**assistant, name: demanded[name]}, optional=_but(name, others | silent)) for name in demanded),
            record(
                {"role": {**string(least=1), "not": {"enum": list(ROLES)}}},
                optional={**others, "content": nullable(*content)},
            ),
        )
        return array(either(*kinds), least=1, most=terms.limits.max_messages)

    def read(self, value: Value) -> tuple[Message, ...]:
        terms = value.terms
        sent = value.elements(terms.limits.max_messages, self.words(terms), is_needed=True)
        messages = tuple(_read(each, f"{value.name}[{at}]", terms.limits) for at, each in enumerate(sent))
        check_amount(len(images_of(messages)), terms.limits.max_images, value.name, must=MOST_IMAGES)
        num_chars = sum(map(_num_chars, messages))
        check_amount(num_chars, terms.limits.max_prompt_chars, value.name, must="hold at most {} characters")
        return messages


def images_of(messages: Iterable[Message]) -> tuple[Image, ...]:
    """Return the images of all messages in their order."""
    return tuple(part[IMAGE] for message in messages for part in parts_of(message) if part["type"] == "image")


def parts_of(message: Message) -> list[Message]:
    """Return the parts of a message's content; none if it is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def text_of(message: Message) -> str:
    """Return a message's content as one text, without images."""
    texts = [part["text"] for part in parts_of(message) if part["type"] == "text"]
    return "\n".join(texts) if texts else str(message.get("content") or "")


def _num_chars(message: Message) -> int:
    parts = parts_of(message) or [{"text": message.get("content") or ""}]
    members = [*((name, member) for part in parts for name, member in part.items()), *message.items()]
    return sum(len(str(member)) for name, member in members if name not in ("content", IMAGE))


def _image_part(terms: Terms) -> Schema:
    url = images_schema(terms.limits)["items"]
    return tagged(IMAGE, {IMAGE: either(url, record({"url": url}))})


@dataclass(frozen=True, slots=True)
class TemplateVariables:
    """An object of further variables for the chat template."""

    taken: frozenset[str]

    def words(self, terms: Terms) -> str:
        return f"an object of variables for the chat template, none of them {', '.join(sorted(self.taken))}"

    def schema(self, terms: Terms) -> Schema:
        return record(optional={name: {"not": {}} for name in sorted(self.taken)})

    def read(self, value: Value) -> dict[str, object]:
        if not isinstance(value.sent, dict) or self.taken & value.sent.keys():
            raise value.refused(self.words(value.terms))
        _check_size(value)
        return value.sent


class Documents:
    """A list of objects, which are for the chat template to read."""

    def words(self, terms: Terms) -> str:
        return f"a list of objects, of at most {terms.limits.max_constraint_chars} characters together"

    def schema(self, terms: Terms) -> Schema:
        return array(OBJECT)

    def read(self, value: Value) -> list[dict[str, object]]:
        if not isinstance(value.sent, list) or not all(isinstance(each, dict) for each in value.sent):
            raise value.refused(self.words(value.terms))
        _check_size(value)
        return value.sent


def _check_size(value: Value) -> None:
    num_chars = len(json.dumps(value.sent, ensure_ascii=False))
    check_amount(num_chars, value.terms.limits.max_constraint_chars, value.name, must="have at most {} characters")


def _read(sent: object, path: str, limits: WireLimits) -> Message:
    """Return the message as it was sent, without members that are null; a content that is null stays."""
    role = sent.get("role") if isinstance(sent, dict) else None
    if not isinstance(sent, dict) or not isinstance(role, str) or not role:
        raise _refused(
            path, f'an object with a "role", which is {", ".join(ROLES)} or one that the template knows', sent
        )
    message: Message = {name: value for name, value in sent.items() if value is not None}
    for name in TEXTS:
        if name in message:
            _text(message[name], f"{path}.{name}")
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], f"{path}.tool_calls")
        message = message if message["tool_calls"] else _but("tool_calls", message)
    content = sent.get("content")
    says_otherwise = any(name in message for name in ("tool_calls", *REASONING))
    if content is None and "content" in sent and role not in ASKING:
        message["content"] = None
    elif content is not None or role in ASKING or (role == "assistant" and not says_otherwise):
        message["content"] = _content(content, f"{path}.content", limits if role != "assistant" else None)
    return message


def _but(name: str, members: Message) -> Message:
    """Return the members without that of this name."""
    return {each: value for each, value in members.items() if each != name}


def _content(sent: object, path: str, limits: WireLimits | None) -> str | list[Message]:
    """Read a content that is a text or a list of parts.

    limits: of images; None takes none
    """
    if isinstance(sent, str):
        return sent
    if not isinstance(sent, list):
        raise _refused(path, "a string or a list of parts", sent)
    return [_part(part, f"{path}[{at}]", limits) for at, part in enumerate(sent)]


def _part(sent: object, path: str, limits: WireLimits | None) -> Message:
    kind = sent.get("type") if isinstance(sent, dict) else None
    if isinstance(sent, dict) and kind in PART_TYPES:
        text = _text(sent.get(kind), f"{path}.{kind}")
        return {"type": "text", "text": text} if kind == "refusal" else sent
    if isinstance(sent, dict) and kind == IMAGE and limits is not None:
        image, where = sent.get(IMAGE), f"{path}.{IMAGE}"
        image, where = (image.get("url"), f"{where}.url") if isinstance(image, dict) else (image, where)
        return {"type": "image", IMAGE: read_image(image, where, limits)}
    if isinstance(kind, str) and any(medium in kind for medium in MEDIA):
        raise UnsupportedParameter.refusing(
            f"{path}.type", must=f'be "text" or, of who asks, "{IMAGE}"', found=shown(kind)
        )
    if isinstance(sent, dict) and isinstance(kind, str):
        return sent
    raise _refused(path, 'an object whose "type" is "text", with a "text"', sent)


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
    if not isinstance(function.get("arguments"), dict | str | None):
        raise _refused(f"{path}.function.arguments", "an object, or JSON of one in a string", function["arguments"])
    if sent.get("id") is not None:
        _text(sent["id"], f"{path}.id")
    return sent


def _text(sent: object, path: str) -> str:
    if not isinstance(sent, str):
        raise _refused(path, "a string", sent)
    return sent


def _refused(path: str, allowed: str, found: object) -> InvalidRequest:
    return InvalidRequest.refusing(path, must=f"be {allowed}", found=shown(found))


MAX_TOOLS = 128
MAX_NAME_CHARS = 128
NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_NAME_CHARS}}}")
NAME_WORDS = f'a name of 1 to {MAX_NAME_CHARS} letters, digits, "_", "-", ".", ":" and "/"'
TOOL_WORDS = 'an object of "type" "function" with a "function" that has a "name"'
MODES = ("none", "auto", "required")


class ToolList:
    """Functions, each with its own name."""

    def words(self, terms: Terms) -> str:
        limit = terms.limits.max_constraint_chars
        one = f'{TOOL_WORDS}, and may have "description", "parameters" and "strict"'
        return f"a list of at most {MAX_TOOLS} functions, of {limit} characters in all, each {one}"

    def schema(self, terms: Terms) -> Schema:
        function = record(
            {"name": {**STRING, "pattern": f"^{NAME.pattern}$"}},
            optional={
                "description": nullable(STRING),
                "parameters": nullable(record(optional={"type": {"const": "object"}})),
                "strict": nullable(BOOLEAN),
            },
        )
        return array(tagged("function", {"function": function}), most=MAX_TOOLS)

    def read(self, value: Value) -> tuple[Tool, ...]:
        elements = value.elements(MAX_TOOLS, self.words(value.terms))
        tools = tuple(_tool(value, at, element) for at, element in enumerate(elements))
        seen: dict[str, int] = {}
        for tool in tools:
            first = seen.setdefault(tool.name, tool.at)
            if first != tool.at:
                path = f"{value.name}[{tool.at}].function.name"
                must = f"be another than that of {value.name}[{first}]"
                raise InvalidRequest.refusing(path, must=must, found=shown(tool.name))
        _check_length(value, elements)
        return tools


class Choice:
    """A mode, or the function that is to be called; OpenAI's allowed tools are a mode and some functions."""

    def words(self, terms: Terms) -> str:
        return f'"none" or "auto" or "required", or {TOOL_WORDS}, or one of "type" "allowed_tools"'

    def schema(self, terms: Terms) -> Schema:
        named = tagged("function", {"function": record({"name": STRING})})
        tools = array(named, least=1, most=MAX_TOOLS)
        allowed = record({"mode": {"enum": ["auto", "required"]}, "tools": tools})
        return either({"enum": list(MODES)}, named, tagged("allowed_tools", {"allowed_tools": allowed}))

    def read(self, value: Value) -> ToolChoice:
        match value.sent:
            case "none" | "auto" | "required" as mode:
                return ToolChoice(mode=mode)
            case {"type": "function"}:
                return ToolChoice(mode="required", names=(_chosen(value, value.sent),))
            case {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]},
            } if 1 <= len(tools) <= MAX_TOOLS:
                return ToolChoice(mode=mode, names=tuple(dict.fromkeys(_chosen(value, tool) for tool in tools)))
            case _:
                raise value.refused(self.words(value.terms))


def _check_length(value: Value, tools: Sequence[object]) -> None:
    """Bound the tools' length, as they become part of a prompt and maybe a constraint."""
    num_chars, must = sum(len(json.dumps(tool)) for tool in tools), "be of at most {} characters in all, as JSON"
    check_amount(num_chars, value.terms.limits.max_constraint_chars, value.name, must=must)


def _chosen(value: Value, tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            raise value.refused(Choice().words(value.terms))


def _tool(value: Value, at: int, element: object) -> Tool:
    match element:
        case {"type": "function", "function": {"name": str(name), **function}} if isinstance(element, dict):
            pass
        case _:
            raise value.part_refused(at, TOOL_WORDS, element)
    path = f"{value.name}[{at}].function"
    if not NAME.fullmatch(name):
        raise _refused(f"{path}.name", NAME_WORDS, name)
    description = function.get("description")
    if not isinstance(description, str | None):
        raise _refused(f"{path}.description", "a string", description)
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise _refused(f"{path}.strict", "a boolean", strict)
    return Tool(
        name=name,
        at=at,
        sent=element,
        description=description or "",
        parameters=_parameters(path, function.get("parameters")),
        is_strict=strict is True,
    )


def _parameters(path: str, parameters: object) -> Mapping[str, Any] | None:
    if parameters is None:
        return None
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _refused(f"{path}.parameters", "the JSON schema of an object", parameters)
    return parameters
