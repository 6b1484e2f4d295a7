"""Sends spans to an OTLP receiver over HTTP, in batches, from a thread of its own."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from serve_app.observe.settings import TraceSettings
from serve_app.observe.tracing import Tracing

PATH = "/v1/traces"


def tracing(settings: TraceSettings) -> Tracing:
    """What the settings leave open is as the OTEL_* environment says: headers, the service's name, the sampler."""
    sampler = None if settings.sample is None else ParentBased(TraceIdRatioBased(settings.sample))
    resource = Resource.create() if _is_named() else Resource.create({SERVICE_NAME: "serve_app"})
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address_of(settings.endpoint))))
    return Tracing(provider)


def address_of(endpoint: str | None) -> str | None:
    """Where traces go: the endpoint is a receiver's address as in OTEL_EXPORTER_OTLP_ENDPOINT, or the whole address."""
    if endpoint is None or endpoint.rstrip("/").endswith(PATH):
        return endpoint
    return endpoint.rstrip("/") + PATH


def _is_named() -> bool:
    """Whether the environment gives the service a name."""
    return not str(Resource.create().attributes[SERVICE_NAME]).startswith("unknown_service")
