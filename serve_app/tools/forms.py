"""The forms that model families write calls in, a row each; which form a template shows; how a demanded call is
written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from serve_app.core.request import Constraint
from serve_app.core.tools import Tool, ToolParserName, Tools

NAME, KEY, PARENTHESIS = "{name}", "{key}", "("
Tokens = tuple[str, ...]
"""Marks in their order, with NAME or KEY among them. White space may stand before each; the white space in a mark is
what the family writes. A mark behind `?` may be left out, one behind `~` is read and not written, and an id follows one
that ends in `*`. PARENTHESIS at the end says that the arguments are Python's keyword arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What stands around each argument, where these are no JSON: strings as they are, and all else as JSON.

    says_string: the mark around a key which says that the value is a string, whatever it looks like
    """

    key: Tokens
    end: str
    says_string: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """How calls stand in a text. Of several ways, a demanded call is written in the first.

    openers:   before a call, or before all of them; "" is nothing
    heads:     before a call's arguments; every form may also have JSON objects with a name and arguments
    written:   how demanded calls are written: with a head, as a JSON object each, or as a JSON list of objects
    between:   the marks around each argument; None is JSON
    ends:      behind the arguments
    closers:   behind a call, or behind all of them
    strays:    further marks of the family behind calls or around what is said
    separator: between two calls; None is a comma in a list, else the closers, a line break and the opener
    arguments: the member of a JSON object that holds the arguments
    others:    forms that are read beside this one, because nothing is known of the model
    """

    name: ToolParserName
    openers: tuple[str, ...] = ("",)
    heads: tuple[Tokens, ...] = ()
    written: Literal["head", "object", "list"] = "object"
    between: Marks | None = None
    ends: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    separator: str | None = None
    arguments: str = "arguments"
    others: tuple[Form, ...] = ()

    @property
    def behind(self) -> tuple[str, ...]:
        """Every mark that may stand behind a call."""
        return tuple(filter(None, map(mark_of, (*self.ends, *self.closers, *self.strays))))

    @property
    def head_marks(self) -> tuple[str, ...]:
        """The marks that a head may begin with, which are no plain words."""
        marks: list[str] = []
        for tokens in self.heads:
            for token in tokens[: tokens.index(NAME)]:
                if mark_of(token) and not token.lstrip("?~")[0].isalnum():
                    marks.append(mark_of(token))
                if token[0] not in "?~":
                    break
        return tuple(marks)

    @property
    def key_mark(self) -> str:
        """The mark before an argument; "" is none."""
        return "" if self.between is None else mark_of(self.between.key[0])

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark that may be a special token, those of other forms included."""
        found = (*self.openers, *(token for head in self.heads for token in head), *self.behind)
        arguments = () if self.between is None else (*self.between.key, self.between.end)
        marks = map(mark_of, (*found, *arguments))
        own = tuple(mark for mark in dict.fromkeys(marks) if len(mark) > 2 and not mark[0].isalnum())
        return own + tuple(mark for other in self.others for mark in other.marks)

    @property
    def special_marks(self) -> frozenset[str]:
        """Its own marks that look like special tokens: no content, where special tokens are not shown."""
        return frozenset() if self.others else frozenset(filter(re.compile(r"</?[|｜]|\[[A-Z_]+\]").match, self.marks))


def mark_of(token: str) -> str:
    """Return the mark without the signs around it."""
    return token.lstrip("?~").rstrip("*").strip()


PYTHON: Tokens = (NAME, PARENTHESIS)
# fmt: off
HERMES = Form(name="hermes", openers=("<tool_call>\n",), closers=("\n</tool_call>",))
GRANITE = Form(
    name="granite", openers=("<|tool_call|>", "<tool_call>", "<function_call>", "functools"), written="list",
    strays=("<|/tool_call|>", "</tool_call>", "</function_call>", "<|end_of_text|>"),
)
PHI4_MINI = replace(GRANITE, name="phi4_mini", closers=("<|/tool_call|>",))
FIREFUNCTION = Form(
    name="firefunction", openers=("functools", "<functioncall>"), written="list", strays=("</functioncall>",)
)
COHERE = Form(
    name="cohere", openers=("<|START_ACTION|>", "Action:\n```json", "Action: ```json", "Action:```json", "Action:"),
    written="list", closers=("<|END_ACTION|>",), strays=("```", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
INTERNLM = Form(
    name="internlm", openers=("<|action_start|><|plugin|>\n", "<|action_start|> <|plugin|>", "<|plugin|>"),
    closers=("<|action_end|>",), arguments="parameters",
)
NEMOTRON = Form(name="nemotron", openers=("<TOOLCALL>",), written="list", closers=("</TOOLCALL>",))
APERTUS = Form(name="apertus", openers=("<|tools_prefix|>",), written="list", closers=("<|tools_suffix|>",))
GIGACHAT = Form(name="gigachat3", openers=("function call<|role_sep|>\n", "function call"), separator="\n")
XLAM = Form(
    name="xlam", openers=("", "```json", "[TOOL_CALLS]", "<tool_call>"), written="list", strays=("```", "</tool_call>"),
)

QWEN3_CODER = Form(
    name="qwen3_coder", openers=("<tool_call>\n",), heads=(("<function=", '~"', NAME, '~"', ">\n"),), written="head",
    between=Marks(key=("<parameter=", '~"', KEY, '~"', ">\n"), end="\n</parameter>\n"),
    ends=("</function>",), closers=("\n</tool_call>",),
)
SEED_OSS = replace(
    QWEN3_CODER, name="seed_oss", openers=("<seed:tool_call>\n",), closers=("\n</seed:tool_call>",),
)
MINIMAX_M2 = Form(
    name="minimax_m2", openers=("<minimax:tool_call>\n",), heads=(('<invoke name="', NAME, '">\n'),), written="head",
    between=Marks(key=('<parameter name="', KEY, '">'), end="</parameter>\n"),
    ends=("</invoke>\n",), closers=("</minimax:tool_call>",), separator="",
)
DEEPSEEK_V32 = Form(
    name="deepseek_v32", openers=("<｜DSML｜function_calls>\n", "<｜DSML｜tool_calls>"),
    heads=(('<｜DSML｜invoke name="', NAME, '">\n'),), written="head",
    between=Marks(
        key=('<｜DSML｜parameter name="', KEY, '"', '~string="true"', '~string="false"', ">"),
        end="</｜DSML｜parameter>\n", says_string='string="true"',
    ),
    ends=("</｜DSML｜invoke>\n",), closers=("</｜DSML｜function_calls>",), separator="",
    strays=("</｜DSML｜tool_calls>",),
)
STEP3 = Form(
    name="step3", openers=("<｜tool_calls_begin｜>\n",), written="head",
    heads=(("?<｜tool_call_begin｜>", "?function", "?<｜tool_sep｜>", '<steptml:invoke name="', NAME, '">\n'),),
    between=Marks(key=('<steptml:parameter name="', KEY, '">'), end="</steptml:parameter>\n"),
    ends=("</steptml:invoke>", "<｜tool_call_end｜>\n"), closers=("<｜tool_calls_end｜>",), separator="",
)
GLM45 = Form(
    name="glm45", openers=("<tool_call>",), heads=((NAME, "?\n"),), written="head", closers=("</tool_call>",),
    between=Marks(key=("<arg_key>", KEY, "</arg_key>", "\n<arg_value>"), end="</arg_value>\n"),
)
GLM47 = replace(
    GLM45, name="glm47", heads=((NAME,),), separator="</tool_call><tool_call>",
    between=Marks(key=("<arg_key>", KEY, "</arg_key>", "<arg_value>"), end="</arg_value>"),
)
LONGCAT = replace(
    GLM45, name="longcat", openers=("<longcat_tool_call>",), closers=("</longcat_tool_call>",), between=Marks(
        key=("<longcat_arg_key>", KEY, "</longcat_arg_key>", "\n<longcat_arg_value>"), end="</longcat_arg_value>\n",
    ),
)
HUNYUAN = Form(
    name="hunyuan", openers=("<tool_calls>",), written="list", between=GLM45.between,
    heads=(("<tool_call>", "?function", "?<tool_sep>", NAME, "?<tool_sep>", "?\n```json\n"),),
    closers=("</tool_calls>",), strays=("```", "</tool_call>"),
)

MISTRAL = Form(name="mistral", openers=("[TOOL_CALLS]",), heads=((NAME, "~[CALL_ID]*", "?[ARGS]"),), written="list")
MISTRAL_NAMED = replace(MISTRAL, name="mistral_named", written="head", separator="[TOOL_CALLS]")
DEEPSEEK_V3 = Form(
    name="deepseek_v3", openers=("<｜tool▁calls▁begin｜>",), written="head", heads=(
        ("<｜tool▁call▁begin｜>", "?function", "<｜tool▁sep｜>", NAME, "?\n```json\n"),
        ("<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜>"),
    ),
    ends=("\n```", "<｜tool▁call▁end｜>"), closers=("<｜tool▁calls▁end｜>",), separator="\n",
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3, name="deepseek_v31", heads=DEEPSEEK_V3.heads[::-1], ends=("<｜tool▁call▁end｜>",), strays=("```",),
    separator="",
)
KIMI_K2 = Form(
    name="kimi_k2", openers=("<|tool_calls_section_begin|>",), written="head",
    heads=(("<|tool_call_begin|>", "?functions.", NAME, "?:0", "~:*", "<|tool_call_argument_begin|>"),),
    ends=("<|tool_call_end|>",), closers=("<|tool_calls_section_end|>",), separator="",
)
HARMONY = Form(
    name="harmony", openers=("", "<|start|>assistant", "to=functions."), written="head", heads=(
        ("<|channel|>", "?commentary", "~analysis", "? to=functions.", NAME, "? <|constrain|>", "?json", "<|message|>"),
        ("~to=functions.", NAME, "?<|channel|>", "~commentary", "~analysis", "~<|constrain|>", "~json", "<|message|>"),
    ),
    strays=("<|call|>", "<|end|>", "<|return|>"), separator="<|call|><|start|>assistant",
)
LLAMA3 = Form(
    name="llama3", openers=("", "<|python_tag|>"), heads=(("<function=", NAME, ">"), PYTHON),
    strays=("</function>", "<|eom_id|>", "<|eot_id|>"), separator="; ", arguments="parameters",
)
LLAMA4 = replace(
    LLAMA3, name="llama4", openers=("<|python_start|>", "<|python_start|><|python_end|>", "<|python_end|>"),
    strays=("<|python_end|>", "<|eom|>", "<|eot|>"),
)
FUNCTIONARY = Form(
    name="functionary", heads=(
        ("<function=", NAME, ">"), ("~<|from|>assistant", "<|recipient|>", NAME, "<|content|>"), ("?>>>", NAME, "?\n"),
    ),
    strays=("</function>", "<|from|>assistant", "<|recipient|>all", "<|content|>", ">>>all\n"),
)
REACT = Form(
    name="react", openers=("", "Action:", "✿FUNCTION✿:"), heads=((NAME, "~Action Input:", "~✿ARGS✿:"),),
    strays=("✿RESULT✿", "Observation:"),
)
GLM4 = Form(name="glm4", heads=((NAME, "?\n"), (NAME, "```python", "tool_call", PARENTHESIS)), strays=("```",))
GEMMA4 = Form(
    name="gemma4", openers=("<|tool_call>",), heads=(("?call:", NAME),), closers=("<tool_call|>",),
    strays=("<|tool_response>", "<turn|>"), separator="<tool_call|><|tool_call>",
)
FUNCTION_GEMMA = replace(
    GEMMA4, name="functiongemma", openers=("<start_function_call>",), closers=("<end_function_call>",),
    strays=("<start_function_response>",), separator=None,
)

PYTHONIC = Form(
    name="pythonic", openers=("", "<|python_start|>", "<|python_tag|>"), heads=(PYTHON,), written="list",
    strays=("<|python_end|>",),
)
OLMO3 = Form(
    name="olmo3", openers=("<function_calls>\n",), heads=(PYTHON,), closers=("\n</function_calls>",), separator="\n",
)
LFM2 = Form(
    name="lfm2", openers=("<|tool_call_start|>",), heads=(("?```python", NAME, PARENTHESIS),), written="list",
    closers=("<|tool_call_end|>",), strays=("```",),
)
GEMMA3 = Form(
    name="gemma3", openers=("```tool_code\n",), heads=(PYTHON, ("print(", NAME, PARENTHESIS)), closers=("\n```",),
    strays=(")",), separator="\n",
)
# fmt: on
JSON = Form(name="json", openers=("", "```json", "```"), strays=("```",), separator=", ")
"""Without any template: what a prompt asked for, and what completions are held to."""

ALIASES: Mapping[Form, tuple[ToolParserName, ...]] = {
    HERMES: ("qwen", "qwen25", "ernie45", "exaone", "granite4", "smollm3", "interns1"),
    QWEN3_CODER: ("qwen3_xml", "step3p5", "mimo", "nemotron_v3"),
    LLAMA3: ("llama3_json",),
    LLAMA4: ("llama4_json", "llama4_pythonic"),
    DEEPSEEK_V3: ("deepseek_r1", "deepseekv3"),
    DEEPSEEK_V31: ("deepseekv31",),
    DEEPSEEK_V32: ("deepseekv32", "deepseek_v4", "deepseekv4"),
    MINIMAX_M2: ("minimax-m2",),
    HARMONY: ("openai", "gpt-oss", "gpt_oss"),
    GRANITE: ("granite-20b-fc",),
    PHI4_MINI: ("phi4_mini_json",),
    COHERE: ("command_a", "command_r", "cohere_command3"),
    HUNYUAN: ("hunyuan_a13b", "hy_v3", "jamba", "minimax", "apriel"),
    NEMOTRON: ("nemotron_json",),
    FIREFUNCTION: ("functools",),
}
ALL_FORMS = (
    HERMES, QWEN3_CODER, SEED_OSS, GLM45, GLM47, GLM4, LONGCAT, MINIMAX_M2, DEEPSEEK_V32, STEP3, LLAMA3, LLAMA4,
    PYTHONIC, OLMO3, LFM2, GEMMA3, GEMMA4, FUNCTION_GEMMA, MISTRAL, MISTRAL_NAMED, DEEPSEEK_V3, DEEPSEEK_V31,
    KIMI_K2, HARMONY, GRANITE, PHI4_MINI, COHERE, INTERNLM, HUNYUAN, NEMOTRON, APERTUS, FUNCTIONARY, REACT,
    FIREFUNCTION, XLAM, GIGACHAT, JSON,
)  # fmt: skip
FORMS: Mapping[ToolParserName, Form] = {
    name: form for form in ALL_FORMS for name in (form.name, *ALIASES.get(form, ()))
}
UNKNOWN = replace(
    JSON,
    others=tuple(
        form
        for form in ALL_FORMS
        if form not in (JSON, GLM47, MISTRAL_NAMED, DEEPSEEK_V31, PHI4_MINI, FUNCTIONARY, REACT, FIREFUNCTION, XLAM)
    ),
)
"""Nothing is known of the model: JSON, as a prompt may ask for, and every form whose marks say what it is."""

SHOWN: tuple[tuple[tuple[str, ...], Form], ...] = (
    (("<|tool_calls_section_begin|>",), KIMI_K2),
    (("｜DSML｜",), DEEPSEEK_V32),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("<seed:tool_call>",), SEED_OSS),
    (("<minimax:tool_call>",), MINIMAX_M2),
    (("<steptml:",), STEP3),
    (("<longcat_tool_call>",), LONGCAT),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<|tool_call>",), GEMMA4),
    (("<|tool_call_start|>",), LFM2),
    (("<|tool_list_start|>",), LFM2),
    (("<|START_ACTION|>",), COHERE),
    (("Action:", "tool_name"), COHERE),
    (("<|channel|>", "to="), HARMONY),
    (("<|action_start|>",), INTERNLM),
    (("<|tools_prefix|>",), APERTUS),
    (("<TOOLCALL>",), NEMOTRON),
    (("<tool_calls>",), HUNYUAN),
    (("<tool_sep>",), HUNYUAN),
    (("<function_calls>",), OLMO3),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<function=", "<parameter="), QWEN3_CODER),
    (("<arg_key>", "</arg_key><arg_value>"), GLM47),
    (("<arg_key>",), GLM45),
    (("<|tool_call|>",), GRANITE),
    (("<function_call>",), GRANITE),
    (("functools",), FIREFUNCTION),
    (("function call<|role_sep|>",), GIGACHAT),
    (("<|tool|>",), PHI4_MINI),
    (("<tool_call>",), HERMES),
    (("<|recipient|>",), FUNCTIONARY),
    ((">>>all",), FUNCTIONARY),
    (("<|python_start|>",), LLAMA4),
    (("<|start_header_id|>", "<function="), LLAMA3),
    (("<|python_tag|>",), LLAMA3),
    (("<|start_header_id|>", '"parameters"'), LLAMA3),
    (("[gMASK]",), GLM4),
)
"""What a template with all of these marks shows; the most telling first, as families borrow marks of others."""


def form_for(template: str, tool_parser: ToolParserName | None = None) -> Form:
    """Return the form that was named, else the one that the template shows the model."""
    if tool_parser is not None:
        return FORMS[tool_parser]
    return next((form for marks, form in SHOWN if all(mark in template for mark in marks)), UNKNOWN)


ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}
COMBINED = frozenset(("json_schema", "regex", "gbnf"))
"""Kinds of constraints that calls can stand beside, as another thing that the text may be."""
OF_CONTENT = "json_schema"
"""The kind that says what an answer holds. The others say what the whole text is, calls included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is written around calls.

    trigger: what begins calls within other text; "" is nothing, so that they begin the text
    opening, closing: before the first and behind the last
    separator: between two
    begin, end: around the arguments of one; {name} is its name
    """

    trigger: str
    opening: str
    closing: str
    separator: str
    begin: str
    end: str


def call_constraint(tools: Tools, form: Form, beside: Constraint | None = None) -> Constraint | None:
    """Return what the text has to be, given what else (`beside`) is demanded of it; None is any text.

    Where calls are required it is one of them, or several where these are parallel. Where the model chooses, it may
    also be what `beside` says; without that it is any text, in which a call that begins is one of these, as soon as one
    of them is strict. Without a strict tool, an expression or a grammar beside holds the whole text. Arguments of
    strict tools satisfy their schema. So do those of others where a call is required and all of their schemas can be
    followed; otherwise they are any object.
    """
    is_required = tools.choice.mode == "required"
    if not tools.usable or (beside is not None and (is_required or beside.kind not in COMBINED)):
        return beside
    is_free = not is_required and not any(tool.is_strict for tool in tools.usable)
    if is_free and (beside is None or beside.kind != OF_CONTENT):
        return beside
    layout = layout_of(form, is_parallel=tools.is_parallel)
    source = {
        "is_required": is_required,
        "trigger": layout.trigger,
        "opening": layout.opening,
        "closing": layout.closing,
        "separator": layout.separator if tools.is_parallel else None,
        "calls": [_call(tool, form, layout, is_required=is_required) for tool in tools.usable],
        "beside": None if beside is None else {"kind": beside.kind, "source": beside.source, "name": beside.name},
    }
    return Constraint(kind="tools", source=json.dumps(source, separators=(",", ":")), name="tools")


def layout_of(form: Form, *, is_parallel: bool) -> Layout:
    """Return how a demanded call is written in this form."""
    opener, closing, ends = form.openers[0], "".join(form.closers), "".join(form.ends)
    is_list = form.written == "list" or (form.name == "json" and is_parallel)
    default = ", " if is_list else f"{closing}\n{opener}"
    separator = default if form.separator is None else form.separator
    begin, end = f'{{"name": "{NAME}", "{form.arguments}": ', "}"
    trigger = opener.strip()
    if form.written == "head":
        begin = "".join(token.removeprefix("?") for token in form.heads[0] if not token.startswith("~"))
        end = ends
        if not trigger:
            opener, _, rest = begin.partition(NAME)
            trigger, separator, begin = opener.split(" ")[-1], separator + opener, NAME + rest
    elif is_list:
        opener, closing = f"{opener}[", f"]{closing}"
    return Layout(trigger=trigger, opening=opener, closing=closing, separator=separator, begin=begin, end=end)


def _call(tool: Tool, form: Form, layout: Layout, *, is_required: bool) -> dict[str, object]:
    """Return what the constraint's source says of one tool.

    at: the tool's place in the list that was sent
    """
    marks = None
    if form.between is not None and form.written == "head":
        before, _, between = "".join(token for token in form.between.key if not token.startswith("~")).partition(KEY)
        marks = {"key": before, "value": between, "end": form.between.end}
    return {
        "begin": layout.begin.replace(NAME, tool.name),
        "end": layout.end,
        "schema": _schema(tool) if tool.is_strict or is_required else dict(ANY_ARGUMENTS),
        "is_strict": tool.is_strict,
        "at": tool.at,
        "marks": marks,
    }


def _schema(tool: Tool) -> dict[str, Any]:
    if tool.parameters is None:
        return dict(NO_ARGUMENTS if tool.is_strict else ANY_ARGUMENTS)
    return {"type": "object", **tool.parameters}
