"""One trace per completion: spans of what became of it, made when it is over from what was noted anyway.

Nothing is made, imported or asked for where nobody traces, and nothing while a completion runs. Names follow
OpenTelemetry's conventions for generative AI. No prompt, completion, stop string or key is in any span.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_app.observe.attributes import of_leg, of_story
from serve_app.observe.legs import legs_of
from serve_app.router.story import Story

PROPAGATOR = TraceContextTextMapPropagator()
PROPAGATED = (b"traceparent", b"tracestate")
PLAIN = re.compile(rb"[ -~]{1,512}")
"""What W3C's Trace Context has each of them hold at most; the library would write the rest of it to the log."""
Headers = Iterable[tuple[bytes, bytes]]


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
            told = of_leg(leg)
            self._tracer.start_span(leg.name, context, attributes=told, start_time=begun_ns).end(ended_ns)
        root.end(to_epoch_ns + int(ended_at * 1e9))
        return format_trace_id(root.get_span_context().trace_id)

    def close(self) -> None:
        """Send what is left, for a few seconds at most, and end the exporter's thread."""
        self._provider.shutdown()


def carrier_of(headers: Headers) -> Mapping[str, str]:
    """Of a request's headers those that say which trace it is part of; what is longer than they ever are is none."""
    return {name.decode(): value.decode() for name, value in headers if name in PROPAGATED and PLAIN.fullmatch(value)}
