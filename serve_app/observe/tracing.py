"""One trace per completion: spans of what became of it, made when it is over from what was noted anyway.

Nothing is made, imported or asked for where nobody traces, and nothing while a completion runs. Names follow
OpenTelemetry's conventions for generative AI. No prompt, completion, stop string or key is in any span.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_app.api.chat import ChatRequest
from serve_app.api.completion import CompletionRequest
from serve_app.api.embeddings import EmbeddingRequest
from serve_app.core.tenants import LOCAL
from serve_app.router.run import Run
from serve_app.router.stats import PromptStats
from serve_app.router.story import Story

PROPAGATOR = TraceContextTextMapPropagator()
PROPAGATED = (b"traceparent", b"tracestate")
PLAIN = re.compile(rb"[ -~]{1,512}")
"""What W3C's Trace Context has each of them hold at most; the library would write the rest of it to the log."""
PATH = "/v1/traces"
SENT = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed", "stream")
"""Parameters of a request that its span tells."""
MAX_PROMPTS = 16
"""So many of a request's prompts have legs of their own."""

Headers = Iterable[tuple[bytes, bytes]]
Value = str | bool | int | float | Sequence[str]


class Tracing:
    """Told of each completion when it is over."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("serve_app")

    def __call__(self, story: Story, status: int, route: str, headers: Headers) -> str | None:
        """Make the spans of a completion, as parts of the caller's trace where it sent a `traceparent`.

        Returns the trace's id, for the log; None where this one is not sampled.
        """
        ended_at = time.monotonic()
        to_epoch_ns = time.time_ns() - int(ended_at * 1e9)
        attributes = of_story(story, status, route)
        operation, model = attributes["gen_ai.operation.name"], attributes.get("gen_ai.response.model", "")
        root = self._tracer.start_span(
            f"{operation} {model}".strip(),
            context=PROPAGATOR.extract(carrier_of(headers)),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=to_epoch_ns + int(story.started_at * 1e9),
        )
        if not root.is_recording():
            return None
        if status >= 500:
            root.set_status(Status(StatusCode.ERROR))
        context = set_span_in_context(root)
        for leg in legs_of(story, ended_at):
            begun_ns, ended_ns = (to_epoch_ns + int(at * 1e9) for at in (leg.begun_at, leg.ended_at))
            self._tracer.start_span(leg.name, context, attributes=leg.attributes, start_time=begun_ns).end(ended_ns)
        root.end(to_epoch_ns + int(ended_at * 1e9))
        return format_trace_id(root.get_span_context().trace_id)

    def close(self) -> None:
        """Send what is left, for a few seconds at most, and end the exporter's thread."""
        self._provider.shutdown()


def carrier_of(headers: Headers) -> Mapping[str, str]:
    """Return the headers that say which trace a request is part of; one that is too long is left out."""
    return {name.decode(): value.decode() for name, value in headers if name in PROPAGATED and PLAIN.fullmatch(value)}


def tracing(endpoint: str | None, sample: float | None) -> Tracing:
    """Make what sends traces; what is left open is as the OTEL_* environment says: headers, service name, sampler."""
    sampler = None if sample is None else ParentBased(TraceIdRatioBased(sample))
    resource = Resource.create() if _is_named() else Resource.create({SERVICE_NAME: "serve_app"})
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address_of(endpoint))))
    return Tracing(provider)


def address_of(endpoint: str | None) -> str | None:
    """Return where traces go. An endpoint is a receiver as in OTEL_EXPORTER_OTLP_ENDPOINT, or the whole address."""
    if endpoint is None or endpoint.rstrip("/").endswith(PATH):
        return endpoint
    return endpoint.rstrip("/") + PATH


def _is_named() -> bool:
    """Return whether the environment gives the service a name."""
    return not str(Resource.create().attributes[SERVICE_NAME]).startswith("unknown_service")


@dataclass(frozen=True, slots=True)
class Leg:
    """A stretch of a request's time, and what its span tells. begun_at, ended_at: by the monotonic clock, seconds"""

    name: str
    begun_at: float
    ended_at: float
    attributes: Mapping[str, str | int] = field(default_factory=dict)


def legs_of(story: Story, ended_at: float) -> Iterator[Leg]:
    """Yield the legs of a request that is over, as far as it came; each ends when it was over or the request was.

    `admit`: from the first byte to the submission: reading, checking, admission, limits and placement.
    `queue`, `prefill`, `decode`, and `move` where another replica went on: of each prompt. The queue is what its
    replica told; the way there and cutting text into tokens count as prefill, which ends with the first delta.
    `stream`: from the first bytes that were sent to the end.
    """
    run = story.run
    yield Leg("admit", story.started_at, ended_at if run is None else run.stats.entered_at)
    if run is not None:
        for part, prompt, replicas in islice(run.stats.parts, MAX_PROMPTS):
            placed: dict[str, str | int] = {"serve_app.prompt.index": part, "serve_app.attempts": len(replicas)}
            placed["serve_app.replica"] = replicas[-1] if replicas else ""
            yield from _of_prompt(prompt, placed, entered_at=run.stats.entered_at, ended_at=ended_at)
    if story.first_sent_at is not None:
        yield Leg("stream", story.first_sent_at, ended_at)


def _of_prompt(
    prompt: PromptStats, placed: Mapping[str, str | int], *, entered_at: float, ended_at: float
) -> Iterator[Leg]:
    """Yield the legs of one prompt. placed: what each of their spans tells"""
    first_at = ended_at if prompt.first_at is None else prompt.first_at
    report = prompt.report
    stepped_at = first_at if report is None else min(entered_at + report.queue_s, first_at)
    yield Leg("queue", entered_at, stepped_at, placed)
    if report is not None:
        computed = {"serve_app.tokens": report.num_tokens - report.num_cached_tokens}
        yield Leg("prefill", stepped_at, first_at, {**placed, **computed})
    if prompt.first_at is not None and prompt.last_at is not None and prompt.num_completion_tokens:
        generated = {"serve_app.tokens": prompt.num_completion_tokens}
        yield Leg("decode", prompt.first_at, prompt.last_at, {**placed, **generated})
    for lost_at, went_on_at in prompt.pauses:
        yield Leg("move", lost_at, went_on_at, placed)


def of_story(story: Story, status: int, route: str) -> dict[str, Value]:
    """Return the attributes of the span of a whole request."""
    request = story.request
    is_chat, is_embedding = isinstance(request, ChatRequest), isinstance(request, EmbeddingRequest)
    found: dict[str, Value] = {
        "gen_ai.operation.name": "embeddings" if is_embedding else "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": "serve_app",
        "http.request.method": "POST",
        "http.route": route,
        "http.response.status_code": status,
        "serve_app.request_id": story.request_id,
    }
    if story.identity is not LOCAL:
        found["serve_app.tenant"] = story.identity.tenant.name
    if request is not None and not is_embedding:
        found |= _of_request(request)
    if story.run is not None:
        found |= _of_run(story.run)
    if story.first_sent_at is not None:
        found["gen_ai.response.time_to_first_chunk"] = story.first_sent_at - story.started_at
    if story.error is not None:
        found["error.type"] = story.error.code
    return found


def _of_request(request: CompletionRequest) -> Mapping[str, Value]:
    sent = {
        "gen_ai.request.choice.count": request.n,
        **{f"gen_ai.request.{name}": getattr(request, name) for name in SENT},
    }
    return {name: value for name, value in sent.items() if value is not None}


def _of_run(run: Run) -> Mapping[str, Value]:
    models = ",".join(model.name for model in run.stats_by_model)
    usage = run.stats.usage
    return {
        "gen_ai.request.model": models,
        "gen_ai.response.model": models,
        "gen_ai.response.id": run.response_id,
        "gen_ai.response.finish_reasons": [reason.value for reason in run.stats.finish_reasons],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "serve_app.engine_seconds": run.stats.engine_ns / 1e9,
    }
