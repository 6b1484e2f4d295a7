"""Messages as a template is given them: as transformers does it, or as texts where it knows no parts, calls, tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

Members = dict[str, Any]
REASONING = ("reasoning_content", "thinking", "reasoning")
SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
TOOL_PROMPT = """# Tools

You may call one or more functions to help the user. Here are their JSON schemas, one on each line:
<tools>
{tools}
</tools>"""
FORM_PROMPT = """

To call a function, write a JSON object with its name and its arguments between <tool_call> and </tool_call>:
<tool_call>
{"name": "the function's name", "arguments": {"an argument's name": "its value"}}
</tool_call>
The results of your calls come between <tool_response> and </tool_response>."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a template writes of what it is given: tools; calls with their results; a content that is a string."""

    tools: bool = True
    history: bool = True
    text: bool = True


class Arguments(dict[str, Any]):
    """The arguments of a call: an object that is its JSON where a template writes it or adds it to a text.

    sent: an object or a text; a text that holds no object is an empty object to templates that want one
    """

    def __init__(self, sent: object) -> None:
        text = sent or "{}" if isinstance(sent, str) else json.dumps({} if sent is None else sent, ensure_ascii=False)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        super().__init__(found if isinstance(found, dict) else {})
        self._text, self._is_text = text, not isinstance(found, dict)

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def is_string(value: object) -> bool:
    """Return whether a template is to take a value for a text: also arguments that hold no object."""
    return isinstance(value, str) or (isinstance(value, Arguments) and value._is_text)


def as_transformers(message: Members) -> Members:
    """Return the message with its thoughts under each of their names, and arguments that are text and object."""
    thoughts = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if thoughts is not None:
        message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_arguments(call) for call in calls]} if isinstance(calls, list) else message


def _with_arguments(call: Members) -> Members:
    function = call["function"]
    return {**call, "function": {**function, "arguments": Arguments(function.get("arguments"))}}


def in_parts(message: Members) -> Members:
    """Return the message with its text as a part, for templates that only read parts."""
    content = message.get("content")
    return {**message, "content": [_part(content)]} if isinstance(content, str) else message


def joined(message: Members) -> Members:
    """Return the message with its parts as one text, for templates that know no parts, unless it has images."""
    content = message.get("content")
    if not isinstance(content, list) or any(part.get("type") != "text" for part in content):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def shows_parts_as_python(members: Members, text: str) -> bool:
    """Return whether a template that knows no parts wrote a list of them as Python does."""
    contents = [message.get("content") for message in members["messages"]]
    return any(isinstance(content, list) and str(content) in text for content in contents)


def with_tools(members: Members, *, in_system: bool, tells_form: bool) -> Members:
    """Return the members with the tools, calls and results written into messages, in a form of our own.

    in_system:  the text stands in the system's message, or else in the first one of the user
    tells_form: it says how to write a call
    """
    messages = history_as_text(members["messages"])
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in members["tools"])
    prompt = TOOL_PROMPT.format(tools=lines) + (FORM_PROMPT if tells_form else "")
    at = next((at for at, each in enumerate(messages) if each["role"] == (SYSTEM if in_system else USER)), None)
    if at is None:
        messages = [{"role": SYSTEM if in_system else USER, "content": prompt}, *messages]
    else:
        first, last = (messages[at].get("content"), prompt) if in_system else (prompt, messages[at].get("content"))
        messages[at] = {**messages[at], "content": _together(first, last)}
    return {name: value for name, value in members.items() if name != "tools"} | {"messages": messages}


def history_as_text(messages: Iterable[Members]) -> list[Members]:
    """Return calls as texts of the assistant and results as texts of the user, one message for texts in a row."""
    told: list[Members] = []
    was_result = False
    for message in messages:
        is_result = message["role"] == TOOL
        told_now = _told(message)
        if (is_result or was_result) and told and told[-1]["role"] == told_now["role"] == USER:
            told[-1] = {**told[-1], "content": _together(told[-1].get("content"), told_now.get("content"))}
        else:
            told.append(told_now)
        was_result = is_result or (was_result and told_now["role"] == USER)
    return told


def _told(message: Members) -> Members:
    if message["role"] == TOOL:
        parts = ["<tool_response>", message.get("content") or "", "</tool_response>"]
        return {"role": USER, "content": _together(*parts, by="\n")}
    if not message.get("tool_calls"):
        return message
    calls = "\n".join(_written(call["function"]) for call in message["tool_calls"])
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": _together(message.get("content"), calls, by="\n")}


def _written(function: Mapping[str, Any]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {function["arguments"]}}}\n</tool_call>'


def _together(*contents: Any, by: str = "\n\n") -> Any:
    """Join texts to one text, or to one list of parts if there are any parts."""
    there = [content for content in contents if content]
    if all(isinstance(content, str) for content in there):
        return by.join(there)
    return [part for content in there for part in (content if isinstance(content, list) else [_part(content)])]


def _part(text: str) -> Members:
    return {"type": "text", "text": text}


def variants(members: Members, shown: Shown, *, tells_form: bool | None) -> Iterator[Members]:
    """Yield the ways to give these members to a template that shows so much, the best first; the caller tries each.

    tells_form: of calls, where a text of ours shows the tools; None is no such text
    """
    if not shown.text:
        members = {**members, "messages": [in_parts(each) for each in members["messages"]]}
    ways = [members]
    if members.get("tools") and not shown.tools and tells_form is not None:
        ways = [with_tools(members, in_system=each, tells_form=tells_form) for each in (True, False)]
    elif not (shown.tools or shown.history) and any(map(_is_of_a_call, members["messages"])):
        ways = [{**members, "messages": history_as_text(members["messages"])}]
    contents = [message.get("content", "") for message in members["messages"]]
    nulls = (_same, _without_null, emptied) if None in contents else (_same,)
    parts = (_same, joined) if any(isinstance(content, list) for content in contents) else (_same,)
    objects = (_same, _with_objects) if any(map(_has_text_arguments, members["messages"])) else (_same,)
    for way, of_call, of_null, of_parts in product(ways, objects, nulls, parts):
        yield {**way, "messages": [of_parts(of_null(of_call(message))) for message in way["messages"]]}


def _has_text_arguments(message: Members) -> bool:
    return any(is_string(call["function"]["arguments"]) for call in message.get("tool_calls") or ())


def _with_objects(message: Members) -> Members:
    """Return the message with arguments of calls as plain objects."""
    calls = [
        {**call, "function": {**call["function"], "arguments": dict(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _is_of_a_call(message: Members) -> bool:
    return message["role"] == TOOL or bool(message.get("tool_calls"))


def _same(message: Members) -> Members:
    return message


def _without_null(message: Members) -> Members:
    """Return the message without members that are null, as transformers does."""
    return {name: value for name, value in message.items() if value is not None}


def emptied(message: Members) -> Members:
    """Return the message with "" as its content if it has none."""
    return {**message, "content": message.get("content") or ""}
