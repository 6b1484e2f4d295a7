"""What a client reads: the same text in one body or in chunks, with prompts and offsets in their places."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import DIALECTS, UNION
from serve_app.api.limits import DEFAULT_LIMITS
from serve_app.api.parse import CHAT
from serve_app.api.responses import (
    CHAT_CHUNK_OBJECT,
    Choice,
    ChunkWriter,
    ResponseHead,
    written_choice,
    written_message,
)
from serve_app.core.delta import Delta, Finish, FinishReason, PromptReport
from serve_app.router.chat import ChatComposer
from serve_app.router.fleet import Fleet
from serve_app.router.inbox import Event
from serve_app.router.message import writing_of
from serve_app.router.render import Composer, StreamRenderer, collect, completion_renderer
from serve_app.router.router import Router
from serve_app.router.stats import RunStats
from tests.fakes import EOS, FakeBackend, model_card
from tests.parsing import parse_completion, parse_request

HEAD = ResponseHead(id="cmpl-1", created=7, model="tiny")


def make_request(**members: object) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "tiny", "prompt": "Hello there", **members}).encode())


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    fleet = Fleet("router-0")
    backend = FakeBackend()
    fleet.put(backend.card, backend)
    yield Router(fleet)
    await fleet.close()


async def whole(router: Router, **members: object) -> dict:
    request = make_request(**members)
    async with router.open(request) as run:
        return json.loads(json.dumps(await collect(run, request, head=HEAD)))


async def streamed(router: Router, **members: object) -> list[dict | str]:
    request = make_request(stream=True, **members)
    stream = b""
    async with router.open(request) as run:
        renderer = completion_renderer(request, HEAD, run.stats)
        async for event in run:
            stream += renderer.chunks(event)
        stream += renderer.tail()
    return read_events(stream)


def read_events(stream: bytes) -> list[dict | str]:
    lines = stream.decode().split("\n\n")
    assert lines.pop() == ""
    payloads = [line.removeprefix("data: ") for line in lines]
    assert payloads[-1] == "[DONE]"
    return [json.loads(payload) for payload in payloads[:-1]] + ["[DONE]"]


OPTIONS = [
    {"max_tokens": 3},
    {"max_tokens": 3, "echo": True},
    {"max_tokens": 0, "echo": True},
    {"max_tokens": 0},
    {"max_tokens": 3, "logprobs": 2},
    {"max_tokens": 3, "logprobs": 2, "echo": True},
    {"max_tokens": 3, "logprobs": 0, "echo": True, "n": 2},
    {"max_tokens": -1, "n": 2},
    {"max_tokens": 9, "stop": "w2", "logprobs": 1},
    {"max_tokens": 2, "prompt": ["one two", [5, 6], ["x", 7]], "n": 2, "echo": True, "logprobs": 1},
]


@pytest.mark.law("Stream and whole")
@pytest.mark.parametrize("options", OPTIONS)
async def test_the_chunks_add_up_to_the_whole_body(router, options):
    body = await whole(router, **options)
    *chunks, done = await streamed(router, **options)
    assert done == "[DONE]"
    for expected in body["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in own) == expected["text"]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + [expected["finish_reason"]]
        assert own[-1]["matched_stop"] == expected["matched_stop"]
        for key in expected["logprobs"] or ():
            parts = [choice["logprobs"][key] for choice in own if choice["logprobs"]]
            assert [entry for part in parts for entry in part] == expected["logprobs"][key]


@pytest.mark.parametrize("options", OPTIONS)
async def test_choices_are_complete_and_in_order(router, options):
    request = make_request(**options)
    body = await whole(router, **options)
    assert [choice["index"] for choice in body["choices"]] == list(range(request.num_choices))
    for choice in body["choices"]:
        assert set(choice) == {"index", "text", "logprobs", "finish_reason", "matched_stop"}
        assert (choice["logprobs"] is not None) == ("logprobs" in options)


async def test_every_choice_echoes_its_own_prompt_exactly(router):
    body = await whole(router, prompt=["one two", [5, 6]], n=2, echo=True, max_tokens=1)
    assert [choice["text"] for choice in body["choices"]] == [
        "one two p0s0w0",
        "one two p0s1w0",
        "<5><6> p1s0w0",
        "<5><6> p1s1w0",
    ]


async def test_offsets_count_in_the_text_that_is_returned(router):
    body = await whole(router, prompt="one two", echo=True, logprobs=1, max_tokens=2)
    choice = body["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["one", " two", " p0s0w0", " p0s0w1"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [2, 2, 2]


async def test_without_echo_the_first_token_is_at_offset_zero(router):
    body = await whole(router, logprobs=0, max_tokens=2)
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 7]
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{" p0s0w0": -1.25}, {" p0s0w1": -1.25}]


async def test_scoring_generates_nothing_and_reports_the_prompt(router):
    body = await whole(router, prompt="one two three", echo=True, logprobs=1, max_tokens=0)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one two three", "length")
    assert choice["logprobs"]["tokens"] == ["one", " two", " three"]
    assert body["usage"]["completion_tokens"] == 0


async def test_a_stop_and_an_end_of_sequence_are_told_apart_by_type(router):
    stopped = await whole(router, stop=["w1"], max_tokens=9)
    assert stopped["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "text": " p0s0w0 p0s0",
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": "w1",
    }
    ended = await whole(router, max_tokens=-1)
    assert ended["choices"][0]["matched_stop"] == EOS


async def test_usage_comes_last_and_only_where_it_was_asked_for(router):
    plain = await streamed(router, max_tokens=2)
    assert all("usage" not in chunk for chunk in plain[:-1])
    *_, usage, done = await streamed(router, max_tokens=2, stream_options={"include_usage": True})
    assert (usage["choices"], done) == ([], "[DONE]")
    assert usage["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_in_openais_own_streams_every_other_chunk_has_a_usage_of_null_where_it_was_asked_for(router):
    body = {
        "model": "tiny",
        "prompt": "a b",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for dialect, others in (("openai", [None]), ("vllm", ["none"])):
        request = parse_completion(json.dumps(body).encode(), choose_dialect=lambda _, named=dialect: DIALECTS[named])
        async with router.open(request) as run:
            renderer = completion_renderer(request, HEAD, run.stats)
            stream = b"".join([renderer.chunks(event) async for event in run]) + renderer.tail()
        *chunks, last, _ = read_events(stream)
        assert [chunk.get("usage", "none") for chunk in chunks] == others * 3
        assert last["usage"]["completion_tokens"] == 3


async def test_continuous_usage_counts_each_choice_and_needs_no_final_usage(router):
    options = {"continuous_usage_stats": True}
    *chunks, _ = await streamed(router, prompt=["one", "two three"], max_tokens=2, stream_options=options)
    seen = [(chunk["choices"][0]["index"], chunk["usage"]) for chunk in chunks]
    for index, prompt_tokens in ((0, 1), (1, 2)):
        assert [usage for i, usage in seen if i == index] == [
            {"prompt_tokens": prompt_tokens, "completion_tokens": t, "total_tokens": prompt_tokens + t} for t in (1, 2)
        ]


async def test_all_chunks_share_id_time_and_model(router):
    *chunks, _ = await streamed(router, n=2, stream_options={"include_usage": True})
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
        ("cmpl-1", "text_completion", 7, "tiny")
    }


class Unaware(Composer):
    """Says of no event that it is text alone, so that each is rendered whole."""

    def is_text_alone(self, event: Event) -> bool:
        return False


@pytest.mark.parametrize(
    ("dialect", "options"),
    [
        *(("union", options) for options in OPTIONS),
        ("union", {"max_tokens": 5, "n": 2, "suffix": "the end"}),
        ("union", {"max_tokens": 5, "return_token_ids": True}),
        ("union", {"max_tokens": 5, "stream_options": {"continuous_usage_stats": True}}),
        ("vllm", {"max_tokens": 5}),
        ("openai", {"max_tokens": 5, "stream_options": {"include_usage": True}}),
        ("llama.cpp", {"max_tokens": 5, "timings_per_token": True}),
    ],
)
async def test_a_chunk_of_text_alone_is_what_it_is_when_rendered_whole(router, dialect, options):
    members = {"model": "tiny", "prompt": "Hello there", "stream": True, **options}
    request = parse_completion(json.dumps(members).encode(), choose_dialect=lambda _: DIALECTS[dialect])
    awkward = ['"', "\\", "\0text\0", "\ud7ff\u2028é", "😀", "\n", ""]
    async with router.open(request) as run:
        quick = completion_renderer(request, HEAD, run.stats)
        plain = StreamRenderer(request, run.stats, composer=Unaware(request), writer=ChunkWriter(HEAD, written_choice))
        texts = itertools.cycle(awkward)
        async for event in run:
            changed = replace(event, delta=replace(event.delta, text=event.delta.text and next(texts)))
            assert quick.chunks(changed) == plain.chunks(changed)
        assert quick.tail() == plain.tail()


class UnawareOfChats(ChatComposer):
    """The same of chats."""

    def is_text_alone(self, event: Event) -> bool:
        return False


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("members", "template"),
    [({}, ""), ({"n": 2}, ""), ({"logprobs": True}, ""), ({"tools": [TOOL]}, ""), ({}, "<think></think>")],
)
def test_a_chunk_of_a_chat_is_what_it_is_when_rendered_whole(members, template):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "stream": True, **members}
    request = parse_request(CHAT, json.dumps(body).encode(), DEFAULT_LIMITS, lambda _: UNION)
    writing = writing_of(replace(model_card("tiny"), chat_template=template))
    quick, plain = (
        StreamRenderer(
            request, RunStats(), composer=composer(request, [writing]),
            writer=ChunkWriter(HEAD, written_message, kind=CHAT_CHUNK_OBJECT),
        )
        for composer in (ChatComposer, UnawareOfChats)
    )  # fmt: skip
    texts = ["<think>", "so", "</think>", "Hi", " 😀", '"\0text\0"', "", '{"name": "look", ', '"arguments": {}}', "."]
    report = PromptReport(num_tokens=3, num_cached_tokens=0)
    for number, (text, sample) in enumerate(itertools.product(texts, range(request.n))):
        finish = Finish(reason=FinishReason.STOP, matched_stop=EOS, num_tokens=10) if text == "." else None
        delta = Delta(
            request_id="r/0", sample=sample, text=text, token_ids=(number,), finish=finish,
            prompt=report if number == 0 else None,
        )  # fmt: skip
        event = Event(index=sample, part=0, delta=delta, completion_tokens=number)
        assert without_ids(quick.chunks(event)) == without_ids(plain.chunks(event))


def without_ids(chunks: bytes) -> bytes:
    """Of calls, which are drawn."""
    return re.sub(rb'"id":"call[^"]*"', b"", chunks)


def test_what_is_the_same_in_all_chunks_of_a_choice_is_rendered_once():
    num_written = 0

    def counted(choice: Choice) -> str:
        nonlocal num_written
        num_written += 1
        return written_choice(choice)

    request = make_request(n=2, stream=True)
    renderer = StreamRenderer(
        request, RunStats(), composer=Composer(request), writer=ChunkWriter(replace(HEAD, model="\0text\0"), counted)
    )
    chunks = [
        renderer.chunks(replace(event_of(Delta(request_id="r/0", sample=index, text=f"w{i}")), index=index))
        for i in range(50)
        for index in (0, 1)
    ]
    assert num_written == 2, "once for each choice"
    found = [json.loads(chunk.removeprefix(b"data: "))["choices"][0] for chunk in chunks]
    assert [(each["index"], each["text"]) for each in found] == [(i, f"w{n}") for n in range(50) for i in (0, 1)]


def event_of(delta: Delta) -> Event:
    return Event(index=delta.sample, part=0, delta=delta)


def test_a_delta_that_shows_nothing_gives_no_chunk():
    renderer = completion_renderer(make_request(), HEAD, RunStats())
    assert renderer.chunks(event_of(Delta(request_id="a", sample=0, token_ids=(5,)))) == b""


def test_a_sample_that_comes_before_the_report_of_its_prompt_waits_for_it():
    renderer = completion_renderer(make_request(n=2, echo=True), HEAD, RunStats())
    assert renderer.chunks(event_of(Delta(request_id="a", sample=1, text=" early"))) == b""
    report = PromptReport(num_tokens=1, num_cached_tokens=0, text="Hello")
    stream = renderer.chunks(event_of(Delta(request_id="a", sample=0, text=" now", prompt=report)))
    texts = [c["choices"][0]["text"] for c in read_events(stream + b"data: [DONE]\n\n")[:-1]]
    assert texts == ["Hello early", "Hello now"]


def test_continuous_usage_is_what_the_run_has_counted_not_what_the_deltas_carried():
    request = make_request(stream=True, stream_options={"continuous_usage_stats": True})
    renderer = completion_renderer(request, HEAD, RunStats())
    report = PromptReport(num_tokens=3, num_cached_tokens=0)
    finish = Finish(reason=FinishReason.STOP, matched_stop=EOS, num_tokens=9)
    event = event_of(Delta(request_id="a", sample=0, prompt=report, finish=finish))
    stream = renderer.chunks(replace(event, completion_tokens=9))
    chunk, _ = read_events(stream + b"data: [DONE]\n\n")
    assert chunk["usage"]["completion_tokens"] == 9
