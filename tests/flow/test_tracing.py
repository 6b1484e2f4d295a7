"""One trace per completion, from its first byte to its last, by the conventions, and nothing in it that was written."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes
from opentelemetry.trace import SpanKind, StatusCode

from serve_app.http.app import build_app
from serve_app.http.settings import HttpSettings
from serve_app.observe.tracing import MAX_PROMPTS, Tracing
from serve_app.router.router import Router
from tests.flow.stack import Stack, running_stack

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "zanzibar"
KNOWN = {
    value
    for module in (gen_ai_attributes, http_attributes, error_attributes)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str)
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def traced_by(exporter: InMemorySpanExporter, **settings: Any) -> Tracing:
    provider = TracerProvider(shutdown_on_exit=False, **settings)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


@pytest.fixture
async def stack(exporter: InMemorySpanExporter) -> AsyncIterator[Stack]:
    exporter.clear()
    settings = HttpSettings(trace=traced_by(exporter))
    async with running_stack(num_replicas=1, threads=1, settings=settings) as stack:
        yield stack


async def posted(stack: Stack, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> int:
    import httpx

    transport = httpx.ASGITransport(app=stack.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://flow") as client:
        return (await client.post(path, json={"model": "demo", **body}, headers=headers, timeout=60)).status_code


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def root_of(exporter: InMemorySpanExporter) -> ReadableSpan:
    (root,) = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    return root


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_stream_is_one_trace_within_its_callers(stack: Stack, exporter: InMemorySpanExporter) -> None:
    sent = f"00-{TRACE}-{PARENT}-01"
    body = {"prompt": f"Once {SECRET}", "max_tokens": 6, "stream": True, "stop": [f"{SECRET}!"], "seed": 4}
    assert await posted(stack, body, traceparent=sent, tracestate="vendor=1") == 200
    spans = exporter.get_finished_spans()
    root = root_of(exporter)
    assert {format(span.context.trace_id, "032x") for span in spans} == {TRACE}
    assert root.parent is not None
    assert format(root.parent.span_id, "016x") == PARENT
    assert root.context.trace_state.get("vendor") == "1"
    children = [span for span in spans if span is not root]
    assert [span.name for span in children] == ["admit", "queue", "prefill", "decode", "stream"]
    assert {span.parent.span_id for span in children if span.parent} == {root.context.span_id}


async def test_its_legs_follow_each_other_and_lie_within_the_whole(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    await posted(stack, {"prompt": "Once upon a time", "max_tokens": 8, "stream": True})
    root = root_of(exporter)
    admit, queue, prefill, decode, stream = (
        named(exporter, name)[0] for name in ("admit", "queue", "prefill", "decode", "stream")
    )
    assert admit.start_time == root.start_time
    assert stream.end_time == root.end_time
    for before, after in ((admit, queue), (queue, prefill), (prefill, decode)):
        assert before.end_time == after.start_time
    for span in (admit, queue, prefill, decode, stream):
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time
    assert decode.start_time <= stream.start_time  # the first bytes follow the first token


async def test_attributes_are_of_the_conventions_or_our_own_and_tell_what_was_used(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    body = {"model": "demo:pirate", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0, "n": 2}
    await posted(stack, body, **{"x-request-id": "client-3"})
    root = root_of(exporter)
    attributes = told(root)
    ours = {name for name in attributes if name.startswith("serve_app.")}
    assert set(attributes) - ours <= KNOWN
    assert root.name == "text_completion demo:pirate"
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.max_tokens"] == 6
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.response.model"] == "demo:pirate"
    assert attributes["gen_ai.usage.output_tokens"] <= 12
    assert attributes["http.route"] == "/v1/completions"
    assert attributes["http.response.status_code"] == 200
    assert attributes["serve_app.request_id"] == "client-3"
    (prefill,) = named(exporter, "prefill")
    assert told(prefill)["serve_app.replica"] == "replica-0"
    assert told(prefill)["serve_app.tokens"] == attributes["gen_ai.usage.input_tokens"]


async def test_nothing_that_was_written_is_in_any_span(stack: Stack, exporter: InMemorySpanExporter) -> None:
    texts = {"prompt": f"Say {SECRET}", "suffix": SECRET, "stop": [SECRET], "user": SECRET, "cache_salt": SECRET}
    await posted(stack, {**texts, "max_tokens": 4})
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
    await posted(stack, chat, "/v1/chat/completions", authorization=f"Bearer {SECRET}")
    await posted(stack, {"model": SECRET, "prompt": "x"})
    await posted(stack, {"prompt": "x", SECRET: 1})
    spans = exporter.get_finished_spans()
    assert len([span for span in spans if span.kind is SpanKind.SERVER]) == 4
    assert SECRET not in "".join(span.to_json() for span in spans)


async def test_kinds_of_requests_are_told_apart(stack: Stack, exporter: InMemorySpanExporter) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    assert await posted(stack, chat, "/v1/chat/completions") == 200
    assert await posted(stack, {"input": "Hello"}, "/v1/embeddings") == 200
    roots = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert [told(root)["gen_ai.operation.name"] for root in roots] == ["chat", "embeddings"]
    assert len(named(exporter, "decode")) == 1


async def test_a_refusal_is_a_trace_of_its_own_with_the_reason(stack: Stack, exporter: InMemorySpanExporter) -> None:
    assert await posted(stack, {"prompt": "x", "temperature": -1}) == 400
    root = root_of(exporter)
    assert told(root)["error.type"] == "invalid_value"
    assert root.status.status_code is StatusCode.UNSET  # the client's fault, by the conventions
    assert [span.name for span in exporter.get_finished_spans()] == ["admit", root.name]


async def test_each_prompt_has_its_legs_and_many_are_bounded(stack: Stack, exporter: InMemorySpanExporter) -> None:
    assert await posted(stack, {"prompt": [f"Story {number}" for number in range(20)], "max_tokens": 2}) == 200
    for name in ("queue", "prefill", "decode"):
        assert [told(span)["serve_app.prompt.index"] for span in named(exporter, name)] == list(range(MAX_PROMPTS))


async def test_what_its_caller_does_not_sample_is_not_made(stack: Stack, exporter: InMemorySpanExporter) -> None:
    await posted(stack, {"prompt": "x", "max_tokens": 1}, traceparent=f"00-{TRACE}-{PARENT}-00")
    assert exporter.get_finished_spans() == ()


async def test_who_samples_nothing_still_follows_a_caller_that_does(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    settings = HttpSettings(trace=traced_by(exporter, sampler=ParentBased(ALWAYS_OFF)))
    other = Stack(app=build_app(Router(stack.fleet), settings), services=[], fleet=stack.fleet)
    await posted(other, {"prompt": "x", "max_tokens": 1})
    assert exporter.get_finished_spans() == ()
    await posted(other, {"prompt": "x", "max_tokens": 1}, traceparent=f"00-{TRACE}-{PARENT}-01")
    assert root_of(exporter).context.trace_id == int(TRACE, 16)


@pytest.mark.parametrize("sent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"])
async def test_a_traceparent_that_is_none_begins_a_trace_anew(
    sent: str, stack: Stack, exporter: InMemorySpanExporter
) -> None:
    assert await posted(stack, {"prompt": "x", "max_tokens": 1}, traceparent=sent) == 200
    assert root_of(exporter).parent is None


async def test_headers_longer_than_a_trace_ever_has_are_looked_at_by_nobody(
    stack: Stack, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    parent = f"00-{TRACE}-{PARENT}-01"
    for sent in ({"traceparent": parent + "-" + "x" * 512}, {"traceparent": parent, "tracestate": "x" * 513}):
        await posted(stack, {"prompt": "x", "max_tokens": 1}, **sent)
    assert [span.parent is None for span in exporter.get_finished_spans() if span.name.startswith("text")] == [
        True,
        False,
    ]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_the_line_in_the_log_names_the_trace(
    stack: Stack, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    logger = logging.getLogger("serve_app.http.completions")
    logger.addHandler(caplog.handler)
    try:
        await posted(stack, {"prompt": "x", "max_tokens": 1}, traceparent=f"00-{TRACE}-{PARENT}-01")
    finally:
        logger.removeHandler(caplog.handler)
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.getMessage().startswith("{")]
    assert lines[-1]["trace_id"] == TRACE
