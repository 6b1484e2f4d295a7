"""Traces reach an OTLP receiver over HTTP, which reads them as OpenTelemetry's own protocol says."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serve_app.http.app import build_app
from serve_app.http.settings import HttpSettings
from serve_app.observe.switch import Switch, TraceSettings
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass(slots=True, kw_only=True)
class Received:
    """What came, and the path that it came to."""

    url: str
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@contextmanager
def receiver() -> Iterator[Received]:
    """A receiver on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            received.paths.append(self.path)
            received.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Received(url=f"http://127.0.0.1:{server.server_port}")
        serving = Thread(target=server.serve_forever, daemon=True)
        serving.start()
        yield received
        server.shutdown()
        serving.join()


async def completed(switch: Switch, settings: TraceSettings | None) -> None:
    """One completion of a service that traces as it is told to."""
    fleet, backend = Fleet("router-0"), FakeBackend()
    fleet.put(await backend.hello("router-0"), backend)
    app = build_app(Router(fleet), HttpSettings(trace=switch.turned(settings)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        body = {"model": next(iter(fleet.cards)), "prompt": "one two", "max_tokens": 3, "stream": True}
        sent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert (await client.post("/v1/completions", json=body, headers=sent)).status_code == 200
    await fleet.close()


async def test_a_trace_reaches_a_receiver_whole() -> None:
    with receiver() as received:
        switch = Switch({})
        await completed(switch, TraceSettings(endpoint=received.url, sample=1.0))
        switch.close()  # sends what is left
        assert set(received.paths) == {"/v1/traces"}
        (resource,) = [each for request in received.requests for each in request.resource_spans]
        names = {each.key: each.value.string_value for each in resource.resource.attributes}
        assert names["service.name"] == "serve_app"
        spans = [span for scope in resource.scope_spans for span in scope.spans]
        assert {span.trace_id.hex() for span in spans} == {TRACE}
        assert [span.name for span in spans if span.parent_span_id.hex() == PARENT] == ["text_completion tiny"]
        assert {"admit", "queue", "prefill", "decode", "stream"} < {span.name for span in spans}


async def test_a_receiver_that_is_not_there_harms_no_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with receiver() as received:
        gone = received.url
    switch = Switch({})
    await completed(switch, TraceSettings(endpoint=gone, sample=0.0))
    switch.turned(None)
    for sending in [each for each in threading.enumerate() if each.name == "traces"]:
        sending.join(30)  # it waits for random times, and while it does no strategy of hypothesis may draw
        assert not sending.is_alive()
