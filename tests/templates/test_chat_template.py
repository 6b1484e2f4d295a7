"""Conversations become what transformers makes of them; what is hostile costs its sender an error and ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from serve_app.core.errors import InvalidRequest, Overloaded
from serve_app.core.prompt import Conversation
from serve_app.templates.chat_template import ChatTemplate
from serve_app.templates.rendering import TemplateLimits, Work

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
IN_INST = """{{ bos_token }}{% set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.system = message.content | trim %}{% continue %}{% endif %}
    {%- if message.role == 'user' %}[INST] {{ ns.system ~ ' ' if ns.system and loop.last }}{{ message.content }}[/INST]
    {%- elif message.role == 'assistant' %}{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}
    {%- else %}{{ raise_exception('only user and assistant roles are supported, not ' + message.role) }}{% endif %}
{%- endfor %}"""
THINKING = """{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content }}
    {%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a | b <|im_end|> é [INST] </s>"},
    {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nYes."},
    {"role": "user", "content": "and?"},
]
NAMES = ("<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<s>", "</s>")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
QUICK = TemplateLimits(max_cpu_s=0.3, max_wall_s=3, max_chars=100_000, max_bytes=128 << 20)


def conversation(messages: list[dict[str, Any]] | None = None, *, continues: bool = False, **more: Any) -> Conversation:
    variables = {"messages": CHAT if messages is None else messages, "add_generation_prompt": not continues, **more}
    return Conversation(source=json.dumps(variables, ensure_ascii=False), continues_last=continues)


@asynccontextmanager
async def template_of(source: str, limits: TemplateLimits = QUICK) -> AsyncIterator[ChatTemplate]:
    work = Work(template=source, special_names=NAMES, special_tokens=TOKENS, limits=limits)
    template = ChatTemplate(work, model_name="tiny")
    try:
        yield template
    finally:
        template.close()


async def refusal(source: str, sent: Conversation | None = None, limits: TemplateLimits = QUICK) -> str:
    async with template_of(source, limits) as template:
        with pytest.raises(InvalidRequest) as caught:
            await template.render(sent or conversation())
    assert caught.value.param == "messages"
    return str(caught.value)


@pytest.mark.parametrize("source", [CHATML, IN_INST, THINKING], ids=["chatml", "inst", "thinking"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}], ids=str)
async def test_a_conversation_is_rendered_as_transformers_renders_it(source: str, variables: dict[str, Any]) -> None:
    async with template_of(source) as template:
        rendering = await template.render(conversation(**variables))
    (expected,), _ = render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=True, **TOKENS, **variables
    )
    assert rendering.text == expected
    assert "<|im_end|> é [INST]" in rendering.text


async def test_places_of_foreign_characters_are_those_that_were_sent_and_no_others() -> None:
    async with template_of(CHATML) as template:
        rendering = await template.render(conversation([{"role": "user", "content": "a<|im_end|>b"}]))
    start = rendering.text.index("a<|im_end|>b") + 1
    assert rendering.foreign == (start, start + 1, start + 8)


async def test_calls_of_tools_are_written_as_json_with_characters_as_they_are() -> None:
    function = {"name": "find", "arguments": {"q": "é | <x>"}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    async with template_of(THINKING) as template:
        rendering = await template.render(conversation([message]))
    assert json.dumps(function, ensure_ascii=False) in rendering.text


async def test_a_message_that_is_gone_on_with_ends_the_prompt_behind_its_last_character() -> None:
    messages = [CHAT[1], {"role": "assistant", "content": "So it is "}]
    async with template_of(CHATML) as template:
        rendering = await template.render(conversation(messages, continues=True))
        assert rendering.text.endswith("<|im_start|>assistant\nSo it is ")
    assert "does not show the last message" in await refusal("{{ 1 }}", conversation(messages, continues=True))


async def test_a_template_may_refuse_and_its_words_are_told() -> None:
    message = await refusal(IN_INST, conversation([{"role": "critic", "content": "5"}]))
    assert message == (
        '"messages" must be what the chat template of tiny takes; found that it says: '
        "only user and assistant roles are supported, not critic."
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{% if %}", "it cannot be compiled: Expected an expression, got 'end of statement block' at line 1"),
        ("{{ messages.x.y }}", "it says: 'list object' has no attribute 'x'"),
        ("{{ messages + 1 }}", "it fails with TypeError"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{{ messages.append(1) }}", "of 'list' object is unsafe"),
        ("{% set n = namespace(_x=1) %}", "a namespace holds no '_x'"),
        ("{% include '/etc/passwd' %}", "it fails with TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it fails with RecursionError"),
    ],
)
async def test_a_template_that_is_no_good_costs_the_request_an_error(source: str, found: str) -> None:
    assert found in await refusal(source)


async def test_what_was_warmed_begins_no_process_with_the_first_conversation() -> None:
    async with template_of(CHATML) as template:
        await template.warm()
        server, idle = template._renderer._server, template._renderer.num_idle
        begun = server._process
        assert begun is not None
        assert idle == 1
        await template.render(conversation())
        assert server._process is begun
        assert template._renderer.num_idle == 1, "the child that waited has rendered"
    async with template_of("") as template:
        await template.warm()
        assert template._renderer._server._process is None, "a model without a template needs none"


LOOP = "{% for a in range(99999) %}"
HOSTILE = {
    "an endless loop": LOOP * 3 + "{% endfor %}" * 3,
    "a text of ten gigabytes": "{{ messages[0].content * 10**10 }}",
    "a constant of ten gigabytes": "{{ 'x' * 10**10 }}",
    "a number of ten gigabytes": "{{ 10**(10**10) }}",
    "a number that has to be computed": "{% set n = messages | length %}{{ (n + 9)**(10**9) }}",
    "a field of a gigabyte": "{{ '%1000000000d' % 1 }}",
    "many short pieces": LOOP * 2 + "xxxxxxxx{% endfor %}{% endfor %}",
    "a list that doubles": "{% set ns = namespace(a=[1]) %}" + LOOP + "{% set ns.a = ns.a + ns.a %}{% endfor %}",
}


@pytest.mark.slow
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_template_is_ended_and_the_next_one_is_served(source: str) -> None:
    hostile = "{% if messages[0].content != 'kind' %}" + source + "{% endif %}kind"
    async with template_of(hostile) as template:
        with pytest.raises(InvalidRequest) as caught:
            await template.render(conversation())
        assert re_matches(str(caught.value)), str(caught.value)
        if "compile" not in str(caught.value):
            kind = conversation([{"role": "user", "content": "kind"}])
            assert (await template.render(kind)).text == "kind"


def re_matches(message: str) -> bool:
    ways = ("too much time or memory", "too much memory", "more than 100000 characters", "MemoryError", "Overflow")
    return any(way in message for way in ways)


@pytest.mark.slow
@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(lambda: [{"role": "user", "content": "x" * 4_000_000}], id="one long message"),
        pytest.param(lambda: [{"role": "user", "content": "<|im_end|>" * 100_000}], id="many marks"),
        pytest.param(lambda: [{"role": "user", "content": "a"}] * 50_000, id="many messages"),
    ],
)
async def test_what_a_tenant_sends_to_an_honest_template_is_bounded(
    messages: Callable[[], list[dict[str, Any]]],
) -> None:
    patient = TemplateLimits(max_cpu_s=20, max_wall_s=60, max_chars=100_000)
    assert "100000 characters" in await refusal(CHATML, conversation(messages()), patient)


async def test_a_model_without_a_template_says_how_to_give_one() -> None:
    message = await refusal("")
    assert "`chat_template` in the `args` of its application" in message


SLOW_WITH_X = "{% if messages[0].content[:2] == 'xx' %}" + LOOP * 4 + "{% endfor %}" * 4 + "{% endif %}done"


@pytest.mark.slow
async def test_a_short_conversation_does_not_wait_for_long_ones_and_the_loop_turns_meanwhile() -> None:
    patient = TemplateLimits(max_cpu_s=4, max_wall_s=60, max_renderings=(1, 1), short_chars=100)
    async with template_of(SLOW_WITH_X, patient) as template:
        slow = asyncio.create_task(template.render(conversation([{"role": "user", "content": "x" * 200}])))
        await asyncio.sleep(0)
        behind = asyncio.create_task(template.render(conversation([{"role": "user", "content": "y" * 200}])))
        assert (await template.render(conversation([{"role": "user", "content": "x"}]))).text == "done"
        assert not slow.done()
        assert not behind.done(), "it is long, and waits for the other"
        num_turns = 0
        while not slow.done():
            num_turns += 1
            await asyncio.sleep(0.001)
        assert num_turns > 100
        with pytest.raises(InvalidRequest, match="too much time"):
            await slow
        assert (await behind).text == "done"


async def test_more_conversations_than_may_wait_are_refused_at_once() -> None:
    async with template_of(CHATML, TemplateLimits(max_waiting=2)) as template:
        tasks = [asyncio.create_task(template.render(conversation())) for _ in range(3)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(each, Overloaded) for each in found] == [False, False, True]
        assert (await template.render(conversation())).text
