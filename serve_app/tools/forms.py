"""The forms that model families write calls in, and which of them a model's chat template asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from serve_app.core.tools import ToolParserName

FormName = Literal["hermes", "llama3", "mistral", "mistral_named", "json", "qwen3_coder", "glm45", "glm47"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedForm:
    """How calls stand in a text whose arguments are each between marks, strings as they are and all else as JSON.

    opener, closer: around a call
    before_name, after_name: around its name
    key, value, end: what stands before a key, between it and its value, and behind that
    space:          what the family writes between two marks
    value_space:    what it writes on either side of a value, which is no part of it
    inner_closer:   what else ends the arguments, before the closer
    """

    name: FormName
    opener: str
    closer: str
    before_name: str = ""
    after_name: str = ""
    key: str
    value: tuple[str, ...]
    end: str
    space: str = "\n"
    value_space: str = ""
    inner_closer: str = ""
    has_special_tokens: bool = False
    """As of `Form`: the marks of these families are tokens of their own, but not special ones."""


QWEN3_CODER = MarkedForm(
    name="qwen3_coder",
    opener="<tool_call>",
    closer="</tool_call>",
    before_name="<function=",
    after_name=">",
    key="<parameter=",
    value=(">",),
    end="</parameter>",
    value_space="\n",
    inner_closer="</function>",
)
GLM45 = MarkedForm(
    name="glm45",
    opener="<tool_call>",
    closer="</tool_call>",
    key="<arg_key>",
    value=("</arg_key>", "<arg_value>"),
    end="</arg_value>",
)
GLM47 = replace(GLM45, name="glm47", space="")
"""The same to whoever reads; newer models write nothing between marks."""

AnyForm = Form | MarkedForm
FORMS: Mapping[ToolParserName, AnyForm] = MappingProxyType(
    {
        **{form.name: form for form in (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, JSON, QWEN3_CODER, GLM45, GLM47)},
        "qwen": HERMES,
        "llama3_json": LLAMA3,
    }
)

_MARKED_OTHERWISE = ("<tool_sep>",)
"""Of families that write calls between the marks of others, in forms that nobody reads here."""


def form_for(template: str, tool_parser: ToolParserName | None = None) -> AnyForm:
    """The form that was named, else the one that the template shows the model; JSON alone where it shows none."""
    if tool_parser is not None:
        return FORMS[tool_parser]
    if MISTRAL.opener in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if QWEN3_CODER.before_name in template and QWEN3_CODER.key in template:
        return QWEN3_CODER
    if GLM45.key in template:
        return GLM47 if "".join(GLM47.value) in template else GLM45
    if HERMES.opener in template and not any(mark in template for mark in _MARKED_OTHERWISE):
        return HERMES
    if LLAMA3.opener in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return LLAMA3
    return JSON
