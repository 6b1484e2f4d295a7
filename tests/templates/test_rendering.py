"""What a template sees is what transformers' `apply_chat_template` gives it; what it does not know is put otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from serve_app.catalog.defaults import ChatTemplates, read_chat_templates
from serve_app.core.tools import Tool, ToolChoice, Tools
from serve_app.templates.messages import FORM_PROMPT
from serve_app.templates.rendering import PROBE_TOOL, Refused, Templates, Work
from serve_app.tools.forms import HERMES
from serve_app.tools.parser import CallParser

FOLDERS = Path("../shared/real-folders")
NAMES = ("<|im_start|>", "<|im_end|>", "<|end|>", "<think>", "</think>", "<tool_call>", "[INST]", "<s>", "</s>")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ODD = "a<b | [c] </think> <tool_call> <|im_end|> </s> é 'q' \"r\""
SYSTEM = {"role": "system", "content": "Be <b>brief</b>."}
ASKS = {"role": "user", "content": f"Hi {ODD}"}
SAYS = {"role": "assistant", "content": "Hello"}
ASKS_MORE = {"role": "user", "content": "And?"}
CITY = {"type": "string", "description": "It", "enum": ["Rome>", "<Ulm"]}
PARAMETERS = {"type": "object", "properties": {"city": CITY}}
FUNCTION = {"name": "weather", "description": f"Of a city {ODD}", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
TEXT_ARGUMENTS = '{"city":"Rome","n":[1]}'


def calls(arguments: object, **more: object) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "type": "function",
            "function": function}], **more}  # fmt: skip


RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": f"sunny {ODD}"}
CALLS = calls({"city": "Rome", "n": [1]})
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [ASKS],
    "system": [SYSTEM, ASKS],
    "turns": [ASKS, SAYS, ASKS_MORE],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "one <a>"}, {"type": "text", "text": ODD}]}],
    "thoughts": [ASKS, {**SAYS, "reasoning_content": f"Because {ODD}"}, ASKS_MORE],
    "thoughts, older name": [ASKS, {**SAYS, "reasoning": "Because"}, ASKS_MORE],
    "thoughts of gpt-oss": [ASKS, {**SAYS, "thinking": "Because"}],
    "thoughts in the text": [ASKS, {**SAYS, "content": "<think>\nwhy\n</think>\n\nYes."}, ASKS_MORE],
    "tags": [ASKS, {**SAYS, "content": f"x</think>y <think> {ODD}"}, {**ASKS_MORE, "content": f"a</think>b {ODD}"}],
    "call": [ASKS, CALLS],
    "result": [ASKS, CALLS, RESULT],
    "result, later": [SYSTEM, ASKS, CALLS, RESULT, SAYS, ASKS_MORE],
    "thoughts of a call": [ASKS, {**CALLS, "reasoning_content": "hm"}, RESULT],
    "text of arguments": [ASKS, calls(TEXT_ARGUMENTS), RESULT],
    "null beside a call": [ASKS, {**CALLS, "content": None}, RESULT],
}


def each(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}"


TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
OWN = {
    "parts": each(
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }};{% endfor %}"
        "{% endif %}<|im_end|>"
    ),
    "texts": each("{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"),
    "filters": each("[INST]{{ m.content | trim }}"),
    "thoughts": each(
        "{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}"
        "{% if m.thinking is defined %}<think>{{ m.thinking }}</think>{% endif %}{{ m.reasoning_content }}{{ c }}"
        "{{ eos_token }}"
    ),
    "repr": "{% for t in tools or [] %}{{ t.function.parameters.properties.city.enum }}{{ t.function.name }}"
    "{{ t | tojson(ensure_ascii=true) }}{% endfor %}"
    + each("{{ m.content }}{{ m.tool_calls }}{{ m.content | length }}"),
    "calls": TOOLS
    + each(
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% if c.function.arguments is string %}"
        "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}{% endif %}{% endfor %}"
        "{{ m.content or '' }}<|im_end|>"
    ),
    "adding": TOOLS
    + each(
        "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c['function']['name'] + c['function']['arguments'] }}"
        "<|im_end|>{% endfor %}{% if m.content is not none %}{{ m.content }}{% endif %}"
    ),
}


def templates_of(found: ChatTemplates, names: tuple[str, ...] = NAMES, **more: Any) -> Templates:
    templates = Templates(
        Work(template=found.default, tool_template=found.tool_use, special_names=names, special_tokens=TOKENS, **more)
    )
    templates.shown = templates.look()
    return templates


def rendered(templates: Templates, messages: list[dict[str, Any]], *, continues: bool = False, **more: Any) -> str:
    members = {"messages": messages, "add_generation_prompt": not continues, **more}
    return templates.render(json.dumps(members, ensure_ascii=False), continues_last=continues)[0]


def reference(template: str, messages: list[dict[str, Any]], **more: Any) -> str | Exception:
    """What `apply_chat_template` gives, which leaves out what is null."""
    given = [{name: value for name, value in message.items() if value is not None} for message in messages]
    try:
        (text,), _ = render_jinja_template([given], chat_template=template, **TOKENS, **more)
    except Exception as error:
        return error
    return str(text)


def differing(found: ChatTemplates) -> Iterator[str]:
    """Chats that are rendered otherwise than by transformers, but for what it fails on or what is told otherwise."""
    templates = templates_of(found)
    _, with_tools = templates.shown
    for name, messages in CHATS.items():
        tools = [TOOL] if any("tool_calls" in message for message in messages) else None
        template = (found.tool_use if tools else "") or found.default
        expected = reference(template, messages, tools=tools, add_generation_prompt=True)
        if isinstance(expected, Exception) or "[{'type': 'text'" in expected or (tools and not with_tools.tools):
            continue
        if name == "text of arguments":  # an object where the template takes one, else the text
            as_object = reference(template, CHATS["result"], tools=tools, add_generation_prompt=True)
            expected = expected if isinstance(as_object, Exception) else as_object
        given = {"tools": tools} if tools else {}
        if rendered(templates, messages, **given) != expected:
            yield name
    continued = [ASKS, {"role": "assistant", "content": "So it is "}]
    expected = reference(found.default, continued, continue_final_message=True)
    if isinstance(expected, str) and rendered(templates, continued, continues=True) != expected:
        yield "continued"


@pytest.mark.parametrize("name", OWN)
def test_templates_of_every_kind_are_rendered_as_transformers_renders_them(name: str) -> None:
    assert list(differing(ChatTemplates(default=OWN[name]))) == []


FOUND = [folder for folder in sorted(FOLDERS.glob("*")) if read_chat_templates(folder)]


@pytest.mark.skipif(not FOUND, reason="needs templates of real models")
@pytest.mark.parametrize("folder", FOUND, ids=lambda folder: folder.name)
def test_templates_of_real_models_are_rendered_as_transformers_renders_them(folder: Path) -> None:
    assert list(differing(read_chat_templates(folder))) == []


SPECIAL = re.compile(r"<[|｜]?[\w▁/]+[|｜]?>|\[/?[A-Z_]+\]")


def own_tokens(templates: Templates, names: set[str], odd: str) -> list[str]:
    """Special tokens in the text that are the template's own, where a client's texts hold this."""
    chat = [{**ASKS, "content": odd}, {**SAYS, "content": f"x{odd}y"}, {**ASKS_MORE, "name": "end", "content": odd}]
    members = {"messages": chat, "add_generation_prompt": True}
    text, foreign = templates.render(json.dumps(members), continues_last=False)
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    found = [each for each in pattern.finditer(text) if not any(each.start() <= at < each.end() for at in foreign)]
    return [each[0] for each in found]


@pytest.mark.law("Foreign text")
@pytest.mark.parametrize("name", OWN)
def test_tokens_are_special_where_the_template_wrote_them_and_nowhere_else(name: str) -> None:
    check_tokens(OWN[name])


@pytest.mark.skipif(not FOUND, reason="needs templates of real models")
@pytest.mark.parametrize("folder", FOUND, ids=lambda folder: folder.name)
def test_tokens_of_real_templates_are_special_where_they_wrote_them(folder: Path) -> None:
    check_tokens(read_chat_templates(folder).default)


def check_tokens(template: str) -> None:
    names = set(SPECIAL.findall(template)) | set(NAMES)
    templates = templates_of(ChatTemplates(default=template), tuple(names))
    harmless = own_tokens(templates, names, "odd")
    assert own_tokens(templates, names, " ".join(sorted(names - {"<think>", "</think>"}))) == harmless
    assert own_tokens(templates, names, "<|im_ end|> <| | [INST") == harmless


def test_the_template_for_tools_is_taken_where_tools_are_sent() -> None:
    both = ChatTemplates(default="plain {{ messages[0].content }}", tool_use="may {{ tools | tojson }}")
    templates = templates_of(both)
    assert rendered(templates, [ASKS_MORE]) == "plain And?"
    assert rendered(templates, [ASKS_MORE], tools=[TOOL]).startswith("may [{")


@pytest.mark.parametrize("name", ["texts", "filters"])
def test_parts_are_one_text_to_a_template_that_knows_none(name: str) -> None:
    templates = templates_of(ChatTemplates(default=OWN[name]))
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert rendered(templates, parts) == rendered(templates, [{"role": "user", "content": "one\ntwo"}])


def test_a_text_is_a_part_to_a_template_that_knows_parts_alone() -> None:
    only = each("{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}")
    templates = templates_of(ChatTemplates(default=only))
    assert rendered(templates, [ASKS_MORE, SAYS]) == "And?Hello"
    assert rendered(templates, [ASKS_MORE, {**SAYS, "content": "So "}], continues=True) == "And?So "


NONE_TESTED = each("{% if m.content is none %}<none>{% else %}{{ m.content }}{% endif %}")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (NONE_TESTED, "<none>"),
        (each("{{ m.content }}"), ""),
        (each("{{ m.content | default('-') }} or None"), "- or None"),
        (each("{{ 'yes' if 'x' in m.content else 'no' }}"), "no"),
        (each("{{ m.content + '!' }}"), "!"),
    ],
)
def test_no_content_is_none_unless_the_template_cannot_take_that(template: str, text: str) -> None:
    assert rendered(templates_of(ChatTemplates(default=template)), [{"role": "assistant", "content": None}]) == text


@pytest.mark.parametrize(
    ("arguments", "as_text", "as_object"),
    [(TEXT_ARGUMENTS, TEXT_ARGUMENTS, '{"city": "Rome", "n": [1]}city'), ('{\n "q"', '{\n "q"', "{}"),
     ("null", "null", "{}"), ("[1]", "[1]", "{}"), ("", "{}", "{}"), (None, "{}", "{}")],
)  # fmt: skip
def test_arguments_are_their_text_or_an_object_as_the_template_wants(
    arguments: object, as_text: str, as_object: str
) -> None:
    adding, going_through = (templates_of(ChatTemplates(default=OWN[name])) for name in ("adding", "calls"))
    assert f"weather{as_text}<|im_end|>" in rendered(adding, [calls(arguments)])
    wants_object = OWN["calls"].replace("is string", "is number")
    assert f"weather{as_object}" in rendered(templates_of(ChatTemplates(default=wants_object)), [calls(arguments)])
    printed = as_object if as_object != "{}" or as_text == "{}" else as_text
    assert f"weather{printed}" in rendered(going_through, [calls(arguments)])


def test_a_template_that_cannot_take_a_text_of_arguments_is_given_an_object() -> None:
    template = OWN["calls"].replace("{{ c.function.arguments }}", "{{ c.function.arguments.q + 1 }}")
    assert "weather{}" in rendered(templates_of(ChatTemplates(default=template)), [calls('{"q"')])


ALTERNATING = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}[INST]{{ m.content | trim }}{% endfor %}"""


@pytest.mark.parametrize("template", [ALTERNATING, OWN["texts"], OWN["filters"], OWN["parts"]])
@pytest.mark.parametrize("name", ["plain", "parts", "call", "result", "result, later", "null beside a call"])
def test_tools_that_a_template_does_not_show_are_in_the_prompt_with_calls_and_results(template: str, name: str) -> None:
    messages = [message for message in CHATS[name] if message is not SYSTEM]
    templates = templates_of(ChatTemplates(default=template))
    assert not templates.shown[1].tools
    text = rendered(templates, messages, tools=[TOOL])
    assert json.dumps(TOOL, ensure_ascii=False) in text
    assert text.count("<tool_call>\n{") == 1 + any("tool_calls" in message for message in messages)
    assert (f"<tool_response>\nsunny {ODD}\n</tool_response>" in text) == (RESULT in messages)
    assert all(message["content"] in text for message in messages if isinstance(message["content"], str))
    if any("tool_calls" in message for message in messages):
        assert '"name": "weather", "arguments": {"city": "Rome", "n": [1]}' in rendered(templates, messages)


@pytest.mark.parametrize("template", [ALTERNATING, OWN["texts"], OWN["parts"], "hello"])
def test_tools_that_are_to_be_left_out_change_no_prompt(template: str) -> None:
    templates = templates_of(ChatTemplates(default=template), tells_form=None)
    assert rendered(templates, [ASKS_MORE], tools=[TOOL]) == rendered(templates, [ASKS_MORE])


def test_the_default_text_stands_behind_the_systems_own() -> None:
    text = rendered(templates_of(ChatTemplates(default=OWN["texts"])), [SYSTEM, ASKS_MORE], tools=[TOOL])
    assert text.startswith("<|im_start|>system\nBe <b>brief</b>.\n\n# Tools")
    alone = rendered(templates_of(ChatTemplates(default=OWN["texts"])), [ASKS_MORE], tools=[TOOL])
    assert alone.startswith("<|im_start|>system\n# Tools")


def test_the_default_text_shows_calls_as_they_are_read() -> None:
    end = FORM_PROMPT.rindex("</tool_call>") + len("</tool_call>")
    example = FORM_PROMPT[FORM_PROMPT.rindex("\n<tool_call>") : end].strip()
    tool = Tool(name="the function's name", at=0, sent={})
    tools = Tools(sent=(tool,), choice=ToolChoice(mode="auto"))
    found = CallParser(HERMES, tools.usable).feed(example)
    assert [call.name for call in found.calls if call.name] == ["the function's name"]
    assert json.loads("".join(call.arguments for call in found.calls)) == {"an argument's name": "its value"}


def test_a_template_that_shows_nothing_refuses_tools() -> None:
    templates = templates_of(ChatTemplates(default="hello"))
    with pytest.raises(Refused, match="does not show the tools"):
        rendered(templates, [ASKS], tools=[TOOL])


def test_a_probe_that_fails_leaves_a_template_as_it_is() -> None:
    templates = templates_of(ChatTemplates(default="{{ raise_exception('no') }}"))
    with pytest.raises(jinja2.TemplateError, match="no"):
        rendered(templates, [ASKS], tools=[PROBE_TOOL])


def test_a_time_is_the_same_in_both_renderings() -> None:
    clock = "{% for i in range(2000) %}{{ strftime_now('%f') }}{% endfor %}{{ messages[0].content }}<|im_end|>"
    text = rendered(templates_of(ChatTemplates(default=clock)), [ASKS_MORE])
    assert text[:12000] == text[:6] * 2000
