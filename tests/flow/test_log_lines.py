"""Lines of router, replica and engine about a request carry the id that its client knows, and nothing that it wrote."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from serve_app.core.backend import Backend
from serve_app.deployments.logs import ACCESS_LOGGER
from serve_app.deployments.model import Model
from serve_app.http.app import build_app
from serve_app.observe.lines import Lines
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.engine.harness import core_of
from tests.fakes import FakeBackend
from tests.flow.stack import Stack, running_stack

SECRET = "zanzibar"
pytestmark = pytest.mark.slow


class Written(logging.Handler):
    """What the service's loggers write, as they would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self.setFormatter(Lines(lambda: True))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))

    def about(self, request_id: str) -> list[str]:
        """The loggers that wrote of this request."""
        return [each["logger"] for each in self.lines if each.get("request_id") == request_id]


@pytest.fixture
def written() -> Iterator[Written]:
    handler = Written()
    loggers = [logging.getLogger(name) for name in ("serve_app", ACCESS_LOGGER)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield handler
    for logger, level in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


async def posted(stack: Stack, request_id: str, **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=stack.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://flow") as client:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        body = {"model": "demo", "max_tokens": 4, **body}
        return await client.post(path, json=body, headers={"x-request-id": request_id}, timeout=60)


async def test_a_failure_of_the_engine_names_the_requests_that_it_hit(written: Written) -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("the device is gone")

    async with running_stack(num_replicas=1, threads=1) as stack:
        runner: Any = core_of(stack.services[0])._runner
        runner.forward = fail
        response = await posted(stack, "client-7", prompt=SECRET)
        assert response.status_code == 500
        assert {"serve_app.engine.base", ACCESS_LOGGER} <= set(written.about("client-7"))
        assert SECRET not in json.dumps(written.lines)


class Astray(FakeBackend):
    """A replica that cannot be reached when it is given a request."""

    async def submit(self, router_id: str, requests: Any) -> bool:
        raise OSError("no route")


async def test_a_replica_that_cannot_be_reached_is_told_with_the_request(written: Written) -> None:
    fleet = Fleet("router-0")
    backend: Backend = Astray()
    fleet.put(await backend.hello("router-0"), backend)
    stack = Stack(app=build_app(Router(fleet)), services=[], fleet=fleet)
    await posted(stack, "client-8", model=next(iter(fleet.cards)), prompt=SECRET)
    assert "serve_app.router.calls" in written.about("client-8")
    assert SECRET not in json.dumps(written.lines)
    await fleet.close()


async def test_lines_of_a_replica_about_what_it_prepares_name_the_request(written: Written) -> None:
    """A submission as Serve hands it to a replica, whose service says something on its way."""

    class Talks(FakeBackend):
        async def submit(self, router_id: str, requests: Any) -> bool:
            logging.getLogger("serve_app.constraints.compiler").info("a grammar was not compiled")
            return True

    held: Any = SimpleNamespace(_service=Talks(), _refuse_strays=lambda replica_id: None)
    fleet = Fleet("router-0")
    recorded: list[Any] = []

    class Records(FakeBackend):
        async def submit(self, router_id: str, requests: Any) -> bool:
            recorded.extend(requests)
            return await super().submit(router_id, requests)

    backend = Records()
    fleet.put(await backend.hello("router-0"), backend)
    stack = Stack(app=build_app(Router(fleet)), services=[], fleet=fleet)
    await posted(stack, "client-9", model=next(iter(fleet.cards)), prompt=["a", "b"])
    assert {request.client_request_id for request in recorded} == {"client-9"}
    await Model.submit(held, "r0", "router-0", recorded)
    assert "serve_app.constraints.compiler" in written.about("client-9")
    await fleet.close()
