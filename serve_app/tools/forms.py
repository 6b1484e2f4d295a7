"""The forms that model families write calls in, and which of them a model's chat template asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from serve_app.core.tools import ToolParserName

FormName = Literal["hermes", "llama3", "mistral", "mistral_named", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How calls stand in a text.

    opener:     what begins a call wherever it stands; "" is nothing, so that calls stand at the text's beginning alone
    closer:     what ends one that the opener began
    separator:  between two calls without openers
    arguments:  what the arguments' member is called
    begins_bare: whether calls may begin the text without the opener
    takes_list: whether several may stand in a JSON list
    takes_names: whether a name may stand before its arguments, outside of JSON
    has_special_tokens: whether the opener may be a special token, so that texts without these do not show it
    """

    name: FormName
    opener: str
    closer: str = ""
    separator: str = ""
    arguments: str = "arguments"
    begins_bare: bool = False
    takes_list: bool = False
    takes_names: bool = False
    has_special_tokens: bool = False


HERMES = Form(name="hermes", opener="<tool_call>", closer="</tool_call>")
LLAMA3 = Form(
    name="llama3",
    opener="<|python_tag|>",
    separator=";",
    arguments="parameters",
    begins_bare=True,
    has_special_tokens=True,
)
MISTRAL = Form(
    name="mistral",
    opener="[TOOL_CALLS]",
    begins_bare=True,
    takes_list=True,
    takes_names=True,
    has_special_tokens=True,
)
MISTRAL_NAMED = replace(MISTRAL, name="mistral_named")
"""The same to whoever reads; newer models write a name before its arguments, and no list."""

JSON = Form(name="json", opener="", begins_bare=True, takes_list=True)
"""Without any template: what a prompt asked for, and what completions are held to."""

FORMS: Mapping[ToolParserName, Form] = MappingProxyType(
    {
        **{form.name: form for form in (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, JSON)},
        "qwen": HERMES,
        "llama3_json": LLAMA3,
    }
)

_MARKED_OTHERWISE = ("<function=", "<arg_key>", "<tool_sep>")
"""Of families that write calls between the same marks, and not in JSON."""


def form_for(template: str, tool_parser: ToolParserName | None = None) -> Form:
    """The form that was named, else the one that the template shows the model; JSON alone where it shows none."""
    if tool_parser is not None:
        return FORMS[tool_parser]
    if MISTRAL.opener in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if HERMES.opener in template and not any(mark in template for mark in _MARKED_OTHERWISE):
        return HERMES
    if LLAMA3.opener in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return LLAMA3
    return JSON
