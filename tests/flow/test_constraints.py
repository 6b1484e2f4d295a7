"""What a text has to be, from bytes to bytes with the real engine: spellings, dialects, endings, refusals."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from serve_app.api.dialects import DIALECTS
from tests.constraints.test_grammars import ARITHMETIC
from tests.flow.stack import Stack, running_stack

PROMPT = "Once upon a time"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"enum": ["up", "down"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
GBNF_POINT = "root ::= '{\"x\":' [0-9] [0-9]? ',\"y\":\"' ('up' | 'down') '\"}'"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1) as running:
        yield running


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


async def choice_of(stack: Stack, dialect: str = "union", **body: Any) -> dict[str, Any]:
    sent = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 60, **body}
    response = await stack.post(sent, dialect=dialect)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def refusal_of(stack: Stack, dialect: str = "union", **body: Any) -> tuple[int, dict[str, Any]]:
    response = await stack.post({"model": "demo", "prompt": PROMPT, **body}, dialect=dialect)
    answer = response.json()
    return response.status_code, answer.get("error", answer)


async def end_of_text(stack: Stack) -> int:
    """The id of the token that ends the only text there is, the empty one."""
    choice = await choice_of(stack, grammar={"type": "regex", "value": ""}, return_token_ids=True)
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    token_ids: list[int] = choice["token_ids"]
    return token_ids[0]


SPELLINGS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": POINT},
    "json_schema in a string": {"json_schema": json.dumps(POINT)},
    "json_object with a schema": {"response_format": {"type": "json_object", "schema": POINT}},
    "OpenAI's wrapper": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "point", "strict": True, "schema": POINT}}
    },
    "the schema bare": {"response_format": {"type": "json_schema", "json_schema": POINT}},
    "the schema beside": {"response_format": {"type": "json_schema", "schema": POINT}},
    "mistral.rs": {"grammar": {"type": "json_schema", "value": POINT}},
    "llguidance": {"grammar": {"type": "llguidance", "value": {"grammars": [{"json_schema": POINT}]}}},
    "lark": {"grammar": {"type": "lark", "value": f"start: %json {json.dumps(POINT)}"}},
    "structural tag": {
        "response_format": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": POINT}}
    },
    "gbnf": {"grammar": GBNF_POINT},
    "a format of a grammar": {"response_format": {"type": "grammar", "grammar": GBNF_POINT}},
    "ebnf": {"ebnf": GBNF_POINT},
    "regex": {"regex": r'\{"x":[0-9]{1,2},"y":"(up|down)"\}'},
    "a regex with a tag": {"grammar": {"type": "regex", "value": r'\{"x":[0-9]{1,2},"y":"(up|down)"\}'}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_every_spelling_holds_the_text_to_it(stack: Stack, spelling: str) -> None:
    for temperature in (0, 1):
        choice = await choice_of(stack, temperature=temperature, seed=3, **SPELLINGS[spelling])
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"]), POINT)


async def test_json_mode_gives_an_object_and_any_json_anything(stack: Stack) -> None:
    for mode in ({"response_format": {"type": "json_object"}}, {"json_schema": {}}, {"json_schema": "{}"}):
        choice = await choice_of(stack, prompt="[1, 2", max_tokens=24, **mode)
        text = choice["text"]
        assert re.match(r"[\[{\"\dtfn-]", text), text
        assert "response_format" not in mode or text.startswith("{")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_says_nothing_counts_for_nothing(stack: Stack, dialect: str) -> None:
    plain = await choice_of(stack, dialect, max_tokens=8)
    neutral = {"grammar": "", "regex": "", "ebnf": None, "json_schema": "", "tool_choice": "none"}
    neutral["response_format"] = {"type": "text"}
    assert await choice_of(stack, dialect, max_tokens=8, **neutral) == plain
    assert (await choice_of(stack, dialect, **{**neutral, "regex": "[0-9]{3}"}))["finish_reason"] == "stop"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_of_two_that_say_something_the_dialect_obeys_one_or_none(stack: Stack, dialect: str) -> None:
    first = {"grammar": "root ::= 'g'", "json_schema": {"const": 1}}
    second = {"response_format": {"type": "json_object", "schema": {"const": 2}}, "json_schema": {"const": 1}}
    third = {"regex": "r", "ebnf": "root ::= 'e'"}
    obeyed = {"llama.cpp": {"first": "g"}, "sglang": {"second": "2"}}.get(dialect, {})
    for name, both in {"first": first, "second": second, "third": third}.items():
        if name in obeyed:
            response = await stack.post({"model": "demo", "prompt": PROMPT, **both}, dialect=dialect)
            assert response.json()["choices"][0]["text"] == obeyed[name]
            assert response.headers["x-ignored-parameters"] == "json_schema"
        else:
            status, error = await refusal_of(stack, dialect, **both)
            assert status == (422 if dialect == "mistral.rs" else 400)
            assert all(f'"{each}"' in error["message"] for each in both)


async def test_the_example_of_mistral_rs_is_empty_and_ends_with_its_stop(stack: Stack) -> None:
    example = {"grammar": {"type": "regex", "value": "example"}, "stop": "example", "prompt": "Say this is a test."}
    choice = await choice_of(stack, "mistral.rs", temperature=0.7, max_tokens=16, **example)
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("", "stop", "example")


async def test_a_text_that_may_only_end_ends_with_its_last_token(stack: Stack) -> None:
    choice = await choice_of(stack, regex="[0-9]{4}", return_token_ids=True)
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", None)
    assert re.fullmatch("[0-9]{4}", choice["text"])
    assert (await choice_of(stack, regex="[0-9]{4}", max_tokens=2))["finish_reason"] == "length"


async def test_a_text_that_may_end_ends_where_the_model_says_so(stack: Stack) -> None:
    eos = await end_of_text(stack)
    choice = await choice_of(stack, logit_bias={str(eos): 100}, regex="[0-9]{2,9}")
    assert (len(choice["text"]), choice["finish_reason"], choice["matched_stop"]) == (2, "stop", eos)


async def test_stops_cut_whatever_is_complete(stack: Stack) -> None:
    choice = await choice_of(stack, regex="abc[0-9]{3}", stop=["c"])
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("ab", "stop", "c")


async def test_a_complete_text_outlives_neither_min_tokens_nor_ignore_eos(stack: Stack) -> None:
    eos = await end_of_text(stack)
    for options in ({"min_tokens": 12}, {"ignore_eos": True}, {"min_tokens": 12, "ignore_eos": True}):
        choice = await choice_of(stack, regex="[0-9]{3}", **options)
        assert (len(choice["text"]), choice["finish_reason"]) == (3, "stop")
        going_on = await choice_of(stack, regex="[0-9]*", max_tokens=16, logit_bias={str(eos): 100}, **options)
        assert len(going_on["text"]) >= (16 if "ignore_eos" in options else 12)
        assert going_on["text"].isdigit()
    ended = await choice_of(stack, regex="(ab)?", min_tokens=9, logit_bias=[["a", False], ["ab", False]])
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")


async def test_a_text_without_a_way_on_is_refused(stack: Stack) -> None:
    status, error = await refusal_of(stack, regex="@+#", logit_bias=[["@", False]])
    assert (status, error["param"]) == (400, "regex")
    assert "not satisfied yet" in error["message"]


async def test_streams_and_choices_add_up(stack: Stack) -> None:
    body = {"json_schema": POINT, "temperature": 1, "seed": 5, "n": 3, "max_tokens": 60, "logprobs": 1}
    whole = await stack.complete(prompt=[PROMPT, "A cat"], **body)
    events = await stack.stream(prompt=[PROMPT, "A cat"], **body)
    assert len({choice["text"] for choice in whole["choices"]}) > 1
    for choice in whole["choices"]:
        own = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert (own[-1]["finish_reason"], choice["finish_reason"]) == ("stop", "stop")
        jsonschema.validate(json.loads(choice["text"]), POINT)
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


async def test_logprobs_are_those_of_the_model_whatever_is_forbidden(stack: Stack) -> None:
    free = await choice_of(stack, max_tokens=1, logprobs=5)
    held = await choice_of(stack, max_tokens=1, logprobs=5, regex="[0-9]+")
    assert held["logprobs"]["top_logprobs"][0].items() >= free["logprobs"]["top_logprobs"][0].items()
    drawn = await choice_of(stack, max_tokens=1, logprobs=5, regex="[0-9]+", post_sampling_probs=True, temperature=1)
    assert all(re.fullmatch("[0-9]+", token) for token in drawn["logprobs"]["top_logprobs"][0])


@pytest.mark.parametrize(
    ("constraint", "param", "told"),
    [
        ({"regex": "("}, "regex", "unclosed group"),
        ({"grammar": "root ::= x"}, "grammar", '"x", which is no rule'),
        ({"ebnf": "nonsense"}, "ebnf", "line 1"),
        ({"json_schema": "{"}, "json_schema", "be valid JSON"),
        ({"json_schema": {"items": {"not": {"type": "null"}}}}, "json_schema", 'found this at #/items: "not" cannot'),
        ({"response_format": {"type": "xml"}}, "response_format", '"json_schema"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "a schema"),
        ({"grammar": {"type": "regex"}}, "grammar[\"value\"]", 'what the "type" says'),
        ({"grammar": {"type": "lark", "value": 5}}, "grammar[\"value\"]", "a string"),
        ({"regex": "a" * 300_000}, "regex", "at most 262144 characters"),
    ],
)  # fmt: skip
async def test_what_cannot_be_followed_is_refused_before_a_stream(
    stack: Stack, constraint: dict[str, Any], param: str, told: str
) -> None:
    for extra in ({}, {"stream": True}):
        status, error = await refusal_of(stack, **constraint, **extra)
        assert (status, error["param"]) == (400, param)
        assert told in error["message"]


async def test_formats_that_nobody_enforces_are_told(stack: Stack) -> None:
    schema = {"type": "array", "items": {"type": "string", "format": "iri", "maxLength": 3}, "maxItems": 1}
    for stream in (False, True):
        body = {"model": "demo", "prompt": PROMPT, "json_schema": schema, "max_tokens": 20, "stream": stream}
        assert (await stack.post(body)).headers["x-unenforced-formats"] == "iri"
        body["json_schema"] = {**schema, "items": {"type": "string", "format": "date"}}
        assert "x-unenforced-formats" not in (await stack.post(body)).headers


DOCUMENTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama.cpp grammar": ("llama.cpp", {
        "model": "gpt-3.5-turbo", "prompt": "Generate a simple arithmetic expression:", "max_tokens": 20,
        "grammar": ARITHMETIC,
    }),
    "llama.cpp json_schema": ("llama.cpp", {
        "model": "gpt-3.5-turbo", "prompt": "Generate a product:", "max_tokens": 100,
        "json_schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string"}, "price": {"type": "number", "minimum": 0}, "in_stock": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 5},
            },
            "required": ["name", "price"],
        },
    }),
    "fireworks": ("fireworks", {"prompt": "A cat as JSON:", "response_format": {"type": "json_object"}}),
    "fireworks with a schema": (
        "fireworks", {"prompt": "A cat as JSON:", "response_format": {"type": "json_object", "schema": POINT}}
    ),
    "sglang": ("sglang", {"prompt": "A cat:", "response_format": {"type": "json_schema", "json_schema": {
        "name": "cat", "schema": POINT}}}),
    "sglang regex": ("sglang", {"prompt": "A cat:", "regex": "(cat|dog)"}),
    "sglang ebnf": ("sglang", {"prompt": "A cat:", "ebnf": 'root ::= "cat" | "dog"'}),
    "sglang json_schema": ("sglang", {"prompt": "A cat:", "json_schema": json.dumps(POINT)}),
}  # fmt: skip


SLOW_EXAMPLES = ("llama.cpp json_schema",)


@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_EXAMPLES)) for name in DOCUMENTED]
)
async def test_a_documented_example_is_answered(stack: Stack, example: str) -> None:
    dialect, body = DOCUMENTED[example]
    for spoken in (dialect, "union"):
        response = await stack.post({**body, "model": "demo"}, dialect=spoken)
        assert response.status_code == 200, response.text


HOSTILE: dict[str, dict[str, Any]] = {
    "a regex of a megabyte": {"regex": "(ab|c)*" * 150_000},
    "a long regex": {"regex": "(ab|c)*" * 30_000},
    "a hundred patterns": {"json_schema": {"allOf": [
        {"type": "string", "pattern": f"(a|b)*a(a|b){{{count}}}"} for count in range(100)]}},
    "nested groups": {"grammar": "root ::= " + "(" * 5000 + "'a'" + ")" * 5000},
    "nested lists": {"json_schema": "[" * 100_000},
    "nested nots": {"json_schema": '{"not":' * 20_000 + "{}" + "}" * 20_000},
    "many rules": {"grammar": "root ::= " + " ".join(f"r{at}" for at in range(18_000)) + "".join(
        f"\nr{at} ::= 'a' root?" for at in range(9_000))},
}  # fmt: skip


async def test_hostile_constraints_cost_their_sender_an_error_and_nobody_else_anything(stack: Stack) -> None:
    """Each is refused; equal ones are looked at once; what others asked for meanwhile is as ever. One that the clock
    ended, on a machine that is busy, is told to come again."""
    plain = await choice_of(stack, regex="[0-9]{5}", max_tokens=9)
    compiler = stack.services[0]._compiler
    num_before = compiler.num_compiled
    bodies = [{"model": "demo", "prompt": PROMPT, **each} for each in HOSTILE.values()]
    refusals = asyncio.gather(*(stack.post(body) for body in bodies * 2))
    company = await asyncio.gather(*(choice_of(stack, regex="[0-9]{5}", max_tokens=9) for _ in range(4)))
    answers = await refusals
    assert {answer.status_code for answer in answers} <= {400, 503}
    assert all(answer.status_code == 400 or "retry-after" in answer.headers for answer in answers)
    assert company == [plain] * 4
    assert compiler.num_compiled - num_before <= len(bodies) + 2  # those ended by the clock may be tried again
    await stack.settled()
