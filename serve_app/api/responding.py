"""The body of POST /v1/responses, OpenAI's: a chat under other names, as items that are given and items that come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from serve_app.api.chat import CHAT_DEFAULTS, CHAT_PARAMETERS, EFFORTS, ChatRequest
from serve_app.api.dialects import ONLY_MODEL, Dialect
from serve_app.api.error_text import shown
from serve_app.api.forms.constraints import ResponseFormat
from serve_app.api.forms.form import Form, OneOf, Parameter, Terms, Text, Value
from serve_app.api.forms.messages import Choice, Messages, ToolList
from serve_app.api.forms.schema import OBJECT, STRING, Schema, array, either, nullable, record, tagged
from serve_app.api.limits import WireLimits
from serve_app.api.parameters import Carried, Disposition, Inert, NotYet, Renamed
from serve_app.api.parse import Body, read_request
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.tools import Tool, ToolChoice

Item = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
STATELESS = 'Send the whole conversation as "input"; nothing is kept between requests.'
INPUT_WORDS = "a string, or a list of items: messages, function calls with their outputs, and reasoning"
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
REPEATED = (
    "instructions", "max_output_tokens", "metadata", "prompt_cache_key", "safety_identifier", "temperature",
    "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user",
)  # fmt: skip
"""Members of a request that its response tells again."""


@dataclass(frozen=True, slots=True)
class Input:
    """What the model is told: a text of the user's, or items. They become the messages of a chat.

    instructions: the system's message before them
    """

    instructions: str = ""

    def words(self, terms: Terms) -> str:
        return INPUT_WORDS

    def schema(self, terms: Terms) -> Schema:
        return either(STRING, array(OBJECT, least=1))

    def read(self, value: Value) -> object:
        if isinstance(value.sent, list) and value.sent:
            messages = _messages_of(value.sent, value)
        elif isinstance(value.sent, str):
            messages = [{"role": "user", "content": value.sent}]
        else:
            raise value.refused(INPUT_WORDS)
        before = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return Messages().read(replace(value, sent=before + messages))


@dataclass(frozen=True, slots=True)
class Within:
    """An object of which one member is read; the client is told of others."""

    member: str
    form: Form

    def words(self, terms: Terms) -> str:
        article = "an" if self.member[0] in "aeiou" else "a"
        return f'an object with {article} "{self.member}", which is {self.form.words(terms)}'

    def schema(self, terms: Terms) -> Schema:
        return record(optional={self.member: nullable(self.form.schema(terms))})

    def read(self, value: Value) -> object:
        if not isinstance(value.sent, dict):
            raise value.refused(self.words(value.terms))
        for name, each in value.sent.items():
            if name != self.member and each is not None:
                value.ignore(name[:64])
        sent = value.sent.get(self.member)
        return None if sent is None else self.form.read(replace(value, name=f"{value.name}.{self.member}", sent=sent))


class FlatTools:
    """Functions as this route writes them, without an object around each; also as chats do."""

    def words(self, terms: Terms) -> str:
        return 'a list of functions, each an object of "type" "function" with a "name", as in chats otherwise'

    def schema(self, terms: Terms) -> Schema:
        nested = ToolList().schema(terms)
        function = nested["items"]["properties"]["function"]
        flat = {**function, "properties": {"type": {"const": "function"}, **function["properties"]}}
        return {**nested, "items": {**flat, "required": ["type", "name"]}}

    def read(self, value: Value) -> tuple[Tool, ...]:
        tools = []
        for at, tool in enumerate(value.sent if isinstance(value.sent, list) else ()):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind not in ("function", None):
                raise UnsupportedParameter.refusing(
                    f"{value.name}[{at}].type",
                    must='be "function", as the service has no tools of its own',
                    found=shown(kind),
                    remedy="Describe it as a function, and answer its calls.",
                )
            tools.append(_nested(tool))
        return ToolList().read(replace(value, sent=tools) if tools else value)


class FlatChoice:
    """Which function is called, as this route writes it; also as chats do."""

    def words(self, terms: Terms) -> str:
        return (
            '"none" or "auto" or "required", or an object of "type" "function" with a "name", or one of "type"'
            ' "allowed_tools"'
        )

    def schema(self, terms: Terms) -> Schema:
        named = {**tagged("function"), "required": ["type", "name"]}
        return either({"enum": ["none", "auto", "required"]}, named, tagged("allowed_tools"))

    def read(self, value: Value) -> ToolChoice:
        sent = value.sent
        match sent:
            case {"type": "function", "name": _}:
                sent = _nested(sent)
            case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
                sent = {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": mode, "tools": [_nested(tool) for tool in tools]},
                }
            case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
                raise value.refused(self.words(value.terms))
        return Choice().read(replace(value, sent=sent))


class Including:
    """What the response has besides; none of it but log-probabilities is there to be had."""

    def words(self, terms: Terms) -> str:
        return f'a list of names, of which "{LOGPROBS}" is carried out and others are ignored'

    def schema(self, terms: Terms) -> Schema:
        return array(STRING, most=terms.limits.max_stop_strings)

    def read(self, value: Value) -> bool:
        """Return whether log-probabilities are wanted."""
        names = value.elements(value.terms.limits.max_stop_strings, self.words(value.terms))
        for at, name in enumerate(names):
            if not isinstance(name, str):
                raise value.part_refused(at, "a string", name)
            if name != LOGPROBS:
                value.ignore(name)
        return LOGPROBS in names


OWN: Mapping[str, Parameter] = {
    "input": Parameter(Input(), "What the model is told; an item of the role `assistant` is an earlier answer."),
    "instructions": Parameter(
        Text(max_chars=lambda terms: terms.limits.max_prompt_chars), "A message of the system before the input."
    ),
    "include": Parameter(Including(), "What of an answer is told besides."),
    "max_output_tokens": Parameter(
        CHAT_PARAMETERS["max_tokens"].parameter.form,  # type: ignore[union-attr]
        "Tokens generated at most, thoughts included.",
    ),
    "reasoning": Parameter(
        Within("effort", OneOf(*EFFORTS)), "How much the model thinks, where its template knows of that."
    ),
    "text": Parameter(Within("format", ResponseFormat()), "What the text has to be."),
    "tools": Parameter(FlatTools(), "Functions that the model may call."),
    "tool_choice": Parameter(FlatChoice(), "Whether the model calls a function, and which."),
    "truncation": Parameter(
        OneOf("auto", "disabled", read_as=lambda word: word == "auto"),
        "Whether an input that leaves no room in the context loses its beginning.",
    ),
}
"""What is otherwise than in chats."""
CHATS_NAMES: Mapping[str, str] = {
    "input": "messages",
    "max_output_tokens": "max_tokens",
    "reasoning": "reasoning_effort",
    "text": "response_format",
    "truncation": "truncate_sequence",
}
NOT_HERE: Mapping[str, Disposition] = {
    **dict.fromkeys(("previous_response_id", "conversation"), NotYet(instead=STATELESS)),
    "background": NotYet(instead='Send "stream": true.'),
    "prompt": NotYet(instead='Send its text as "instructions" and "input".'),
    "context_management": NotYet([], instead='Send "truncation": "auto".'),
    "moderation": NotYet(),
    **dict.fromkeys(("n", "n_cmpl"), NotYet(1, instead="Send the request as often as answers are wanted.")),
    **dict.fromkeys(("max_tool_calls", "access_programs", "image"), Inert()),
}
RESPONSES_TABLE: Mapping[str, Disposition] = {
    **CHAT_PARAMETERS,
    **NOT_HERE,
    **{
        name: Renamed(CHATS_NAMES[name], form=each.form) if name in CHATS_NAMES else Carried(each)
        for name, each in OWN.items()
    },
}


class ResponsesRequest(ChatRequest):
    """A chat that is answered by items. repeated: members that were sent, for the response to tell again"""

    repeated: Annotated[dict[str, Any], Field(default_factory=dict, exclude=True, repr=False)]

    id_prefix: ClassVar[str] = "resp"
    effort_name: ClassVar[str] = "reasoning.effort"
    prompt_name: ClassVar[str] = "input"


RESPONSES = Body(
    request=ResponsesRequest,
    table=RESPONSES_TABLE,
    required=("model", "input"),
    defaults=CHAT_DEFAULTS,
    default_model=ONLY_MODEL,
)


def read_responses(members: Mapping[str, object], limits: WireLimits, dialect: Dialect) -> ResponsesRequest:
    """Return the request that these members of a JSON object make. Raises InvalidRequest."""
    terms = Terms(limits=limits, dialect=dialect)
    ignored: list[str] = []
    rest = {name: value for name, value in members.items() if value is not None}

    def taken(name: str) -> Any:
        sent = rest.pop(name, None)
        form: Form = OWN[name].form
        return None if sent is None else form.read(Value(name=name, sent=sent, terms=terms, ignored=ignored))

    if taken("include"):
        rest["logprobs"] = True
    elif rest.pop("top_logprobs", None):
        ignored.append("top_logprobs")
    told = Renamed(CHATS_NAMES["input"], form=Input(taken("instructions") or ""))
    kind = replace(RESPONSES, table={**RESPONSES.table, "input": told})
    request = read_request(kind, rest, limits, dialect=dialect, ignored=ignored)
    if request.listed:
        raise InvalidRequest.refusing("model", must="be one name, as a response is one answer", found="a list")
    repeated = {name: members[name] for name in (*REPEATED, "text", "reasoning") if members.get(name) is not None}
    return request.model_copy(update={"repeated": repeated})


def _nested(tool: object) -> object:
    """Return a function in an object of its own, as chats have it."""
    if not isinstance(tool, dict) or "function" in tool:
        return tool
    return {"type": "function", "function": {name: each for name, each in tool.items() if name != "type"}}


def _messages_of(items: Sequence[object], value: Value) -> list[Item]:
    """Return the messages of a chat. Thoughts, text and calls that a model gave in a row are one message."""
    messages: list[Item] = []
    for at, item in enumerate(items):
        found = _message_of(item, f"{value.name}[{at}]", value)
        last = messages[-1] if messages else {}
        if found.get("role") == last.get("role") == "assistant" and _goes_on(last, found):
            calls = [*last.get("tool_calls", ()), *found.get("tool_calls", ())]
            last |= {name: each for name, each in found.items() if each is not None}
            last |= {"tool_calls": calls} if calls else {}
        else:
            messages.append(found)
    return messages


def _goes_on(last: Item, found: Item) -> bool:
    """Return whether an item continues the answer of the item before it: thoughts come first, and calls last."""
    if "tool_calls" in found:
        return True
    has_ended = "tool_calls" in last or last["content"] is not None
    return not has_ended and "reasoning_content" not in found


def _message_of(item: object, path: str, value: Value) -> Item:
    """Return one item as a message, or as a part of one."""
    match item:
        case {"type": "function_call", "call_id": str(call_id), "name": str(name)} if isinstance(item, dict):
            function = {"name": name, "arguments": item.get("arguments")}
            call = {"id": call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
            return {"role": "tool", "tool_call_id": call_id, "content": _content(output, f"{path}.output")}
        case {"type": "reasoning"} if isinstance(item, dict):
            name = "content" if item.get("content") else "summary"
            thoughts = "\n".join(_texts(item.get(name) or [], f"{path}.{name}"))
            if not thoughts and item.get("encrypted_content"):
                value.ignore("encrypted_content")
            return {"role": "assistant", "content": None, **({"reasoning_content": thoughts} if thoughts else {})}
        case {"role": role} if isinstance(item, dict) and item.get("type") in ("message", None):
            return {"role": role, "content": _content(item.get("content"), f"{path}.content")}
        case {"type": str(kind)} if kind not in ("message", "function_call", "function_call_output"):
            raise UnsupportedParameter.refusing(
                f"{path}.type",
                must='be "message", "function_call", "function_call_output" or "reasoning"',
                found=shown(kind),
                remedy=STATELESS if kind == "item_reference" else "Leave it out.",
            )
    must = "be a message, a function call, a function call's output or reasoning, with what belongs to it"
    raise InvalidRequest.refusing(path, must=must, found=shown(item))


def _texts(sent: object, path: str) -> list[str]:
    match _content(sent, path):
        case str(content):
            return [content]
        case [*parts] if all(isinstance(part, dict) and isinstance(part.get("text"), str | None) for part in parts):
            return [part.get("text") or "" for part in parts]
    raise InvalidRequest.refusing(path, must="be a string or a list of texts", found=shown(sent))


def _content(sent: object, path: str) -> Any:
    """Return a content with its parts as chats name them."""
    if not isinstance(sent, list):
        return sent
    return [_part(part, f"{path}[{at}]") for at, part in enumerate(sent)]


def _part(part: object, path: str) -> object:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind in TEXT_PARTS:
        return {"type": "text", "text": part.get("text")}
    if isinstance(part, dict) and kind == "input_image" and part.get("file_id") is None:
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    if isinstance(kind, str) and kind not in ("refusal", "image_url"):
        raise UnsupportedParameter.refusing(
            f"{path}.type",
            must='be "input_text", "output_text", "refusal" or "input_image" with an "image_url"',
            found=shown(kind),
            remedy="Send it as text, or an image as a data URI.",
        )
    return part
