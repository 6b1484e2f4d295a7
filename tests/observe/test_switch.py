"""Who traces: settings, else the environment, else nobody, who then pays nothing for it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from serve_app.deployments.arguments import RouterSettings
from serve_app.http.settings import HttpSettings
from serve_app.observe.switch import WANTED, Switch, TraceSettings, wanted
from serve_app.observe.tracing import address_of

HERE = TraceSettings(endpoint="http://127.0.0.1:4318", sample=0.5)
ENVIRONMENT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}

SERVES = """
import asyncio, sys, httpx
from serve_app.http.app import build_app
from serve_app.observe.switch import Switch
from serve_app.http.settings import HttpSettings
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend

async def main():
    fleet, backend = Fleet("r"), FakeBackend()
    fleet.put(await backend.hello("r"), backend)
    app = build_app(Router(fleet), HttpSettings(trace=Switch({}).turned(None)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        sent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        body = {"model": next(iter(fleet.cards)), "prompt": "a", "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body, headers=sent)).status_code == 200
    await fleet.close()

asyncio.run(main())
print([name for name in sys.modules if name.startswith(("opentelemetry", "serve_app.observe.tracing"))])
"""

MISSING = """
import sys
sys.modules["opentelemetry.exporter.otlp.proto.http.trace_exporter"] = None
from serve_app.observe.switch import TraceSettings
from serve_app.observe.switch import Switch
print(Switch({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}).turned(None))
try:
    Switch({}).turned(TraceSettings(endpoint="http://127.0.0.1:4318"))
except ValueError as error:
    print(error)
"""


def said_by(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_who_does_not_trace_imports_nothing_for_it_whatever_is_sent() -> None:
    assert said_by(SERVES) == ["[]"]
    assert HttpSettings().trace is None


def test_a_missing_package_is_named_where_settings_want_it_and_stops_nothing_where_the_environment_does() -> None:
    assert said_by(MISSING) == ["None", WANTED]


@pytest.mark.parametrize(
    ("settings", "environ", "found"),
    [
        (None, {}, None),
        (HERE, {}, HERE),
        (HERE, {"OTEL_SDK_DISABLED": "true"}, None),
        (None, ENVIRONMENT, TraceSettings()),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/v1/traces"}, TraceSettings()),
        (None, ENVIRONMENT | {"OTEL_TRACES_EXPORTER": "none"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
    ],
)
def test_settings_go_before_the_environment(settings: Any, environ: dict[str, str], found: Any) -> None:
    assert wanted(settings, environ) == found


def test_the_same_settings_keep_what_traces_and_others_exchange_it() -> None:
    switch = Switch({})
    assert switch.turned(None) is None
    first = switch.turned(HERE)
    assert first is not None
    assert switch.turned(HERE) is first
    assert switch.turned(TraceSettings(endpoint="http://127.0.0.1:4319")) is not first
    assert switch.turned(None) is None
    switch.close()


def test_what_a_cluster_file_says_arrives() -> None:
    assert RouterSettings().tracing is None
    said = RouterSettings.model_validate({"tracing": {"endpoint": "http://127.0.0.1:4318", "sample": 0.5}})
    assert said.tracing is not None
    assert (said.tracing.endpoint, said.tracing.sample) == (HERE.endpoint, HERE.sample)
    for wrong in ({"endpoint": "127.0.0.1:4318"}, {"sample": 2}, {"endpont": "http://a"}):
        with pytest.raises(ValueError, match="tracing"):
            RouterSettings.model_validate({"tracing": wrong})


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        (None, None),
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("http://a/v1/traces", "http://a/v1/traces"),
    ],
)
def test_an_endpoint_is_a_receiver_or_a_whole_address(endpoint: str | None, address: str | None) -> None:
    assert address_of(endpoint) == address
