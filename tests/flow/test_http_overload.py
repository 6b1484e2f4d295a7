"""What clients see of a router that is full, that is stopped, or that they do not read from."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.core.delta import Load
from serve_app.core.errors import Unavailable
from serve_app.core.tenants import Identity, Tenant
from serve_app.http.app import build_app
from serve_app.http.guard import Door
from serve_app.http.settings import HttpSettings
from serve_app.router.admission import Admission, AdmissionSettings
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router, RouterConfig
from serve_app.router.run import RunSettings
from tests.fakes import FakeBackend, model_card, replica_card
from tests.flow.test_http_streams import BODY, Connection, connect, settle

NUM_PLACES = 4


@pytest.fixture
def backend() -> FakeBackend:
    card = replace(model_card(), max_num_sequences=2, max_waiting=NUM_PLACES - 2)
    return FakeBackend(replica_card("r0", card), is_stepped=True)


@pytest.fixture
async def fleet(backend: FakeBackend) -> AsyncIterator[Fleet]:
    fleet = Fleet("router-0")
    fleet.put(backend.card, backend)
    yield fleet
    await fleet.close()


@pytest.fixture
def router(fleet: Fleet) -> Router:
    admission = Admission(lambda: fleet.rooms)
    return Router(fleet, RouterConfig(run=RunSettings(max_pending_events=8)), admission=admission)


@pytest.fixture
async def client(router: Router) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(router)), base_url="http://test") as client:
        yield client


async def test_a_full_router_refuses_before_it_reads_the_body_in_the_shape_of_the_dialect(router, backend):
    app = build_app(router)
    inside = [connect(app) for _ in range(NUM_PLACES)]
    await settle()
    assert backend.num_live == NUM_PLACES
    refused = Connection(app, b'{"model": "ti', is_complete=False)
    await asyncio.wait_for(refused.task, 60)
    assert refused.status == 503
    error = json.loads(refused.body)["error"]
    assert (error["error_code"], error["type"]) == ("overloaded", "unavailable_error")
    headers = dict(refused.sent[0]["headers"])
    assert int(headers[b"retry-after"]) >= 1
    assert len(backend.submissions) == NUM_PLACES
    inside[0].leave()
    await settle()
    newcomer = connect(app)
    await settle()
    assert newcomer.sent == []
    assert backend.num_live == NUM_PLACES
    for connection in (*inside[1:], newcomer):
        connection.leave()
    await settle()
    assert router.admission.num_open == 0


async def test_a_request_that_needs_more_than_there_is_is_refused_whole(client, router, backend):
    response = await client.post("/v1/completions", json=BODY | {"n": NUM_PLACES + 1, "stream": False})
    assert (response.status_code, response.json()["error"]["error_code"]) == (503, "overloaded")
    assert "retry-after" in response.headers
    assert backend.submissions == []
    assert router.admission.num_open == 0


async def test_health_models_and_metrics_are_not_behind_admission(client, router):
    tickets = [router.admission.enter() for _ in range(NUM_PLACES)]
    for path in ("/health", "/v1/models", "/metrics"):
        assert (await client.get(path)).status_code == 200
    assert (await client.post("/v1/completions", json=BODY)).status_code == 503
    for ticket in tickets:
        ticket.give_back()


@pytest.mark.parametrize("body", [b"not json", b"{}", json.dumps(BODY | {"model": "nobody"}).encode()])
async def test_a_request_that_is_wrong_gives_its_place_back(client, router, body):
    for _ in range(NUM_PLACES + 1):
        assert (await client.post("/v1/completions", content=body)).status_code in {400, 404}
    assert router.admission.num_open == 0


async def test_a_stopped_router_ends_streams_with_an_error_event_and_whole_answers_with_a_503(router, backend):
    app = build_app(router)
    streaming, whole = connect(app), connect(app, stream=False)
    await settle()
    backend.step()
    await settle()
    router.admission.stop(Unavailable("The server is being stopped; retry.", None, {"retry_after_s": 5}))
    await asyncio.wait_for(asyncio.gather(streaming.task, whole.task), 60)
    _, error, done, rest = streaming.body.decode().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["error_code"] == "unavailable"
    assert (done, rest) == ("data: [DONE]", "")
    assert (whole.status, json.loads(whole.body)["error"]["error_code"]) == (503, "unavailable")
    late = connect(app)
    await late.task
    assert late.status == 503
    await settle()
    assert backend.num_live == 0


async def test_a_draining_router_answers_what_is_open_and_refuses_every_other_route(router, backend):
    app = build_app(router)
    streaming, whole = connect(app, max_tokens=2), connect(app, stream=False, max_tokens=2)
    await settle()
    backend.step()
    stopped = Unavailable("The server is being stopped; retry.", None, {"retry_after_s": 5})
    draining = asyncio.create_task(router.admission.drain(stopped, seconds=60))
    await settle()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as client:
        for path in ("/health", "/v1/models", "/openapi.json", "/"):
            refused = await client.get(path)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5"), path
            assert refused.json()["error"]["error_code"] == "unavailable"
        assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        assert (await client.get("/metrics")).status_code == 200
    assert not draining.done()
    backend.step()
    await asyncio.wait_for(asyncio.gather(streaming.task, whole.task, draining), 60)
    assert streaming.body.decode().endswith("data: [DONE]\n\n")
    assert "error" not in streaming.body.decode()
    assert (streaming.status, whole.status) == (200, 200)


async def test_what_outlasts_the_drain_is_ended_with_an_error(router, backend):
    streaming = connect(build_app(router))
    await settle()
    backend.step()
    await settle()
    await router.admission.drain(Unavailable("stopped", None, {"retry_after_s": 5}), seconds=0)
    await asyncio.wait_for(streaming.task, 60)
    assert '"unavailable"' in streaming.body.decode()


async def test_a_client_that_reads_nothing_pauses_the_engine_and_goes_on_when_it_reads(router, backend):
    connection = connect(build_app(router), max_tokens=40)
    await settle()
    connection.may_send.clear()
    for _ in range(30):
        backend.step()
        await settle()
    assert backend.paused
    connection.may_send.set()
    await settle()
    assert not backend.paused
    for _ in range(40):
        backend.step()
        await settle()
    await asyncio.wait_for(connection.task, 60)
    assert connection.texts == [f" p0s0w{position}" for position in range(40)]


async def test_a_client_that_reads_nothing_for_too_long_is_given_up(router, backend, caplog):
    caplog.set_level(logging.INFO, logger="serve_app.http.completions")
    connection = connect(build_app(router, HttpSettings(max_stall_s=0.01, farewell_s=0.01)), max_tokens=40)
    await settle()
    connection.may_send.clear()
    backend.step()
    await asyncio.wait_for(connection.task, 60)
    await settle()
    assert (backend.num_live, router.admission.num_open) == (0, 0)
    assert json.loads(caplog.messages[-1])["error_code"] == "deadline_exceeded"


async def test_a_log_line_has_its_time_and_no_name_that_a_client_made_up(client, caplog):
    caplog.set_level(logging.INFO, logger="serve_app.http.completions")
    await client.post("/v1/completions", json=BODY | {"sk_secret_key": 1, "tempreture": 1})
    await client.post("/v1/completions", json=BODY | {"temperature": 99})
    assert not {"sk_secret_key", "tempreture"} & set(re.findall(r"\w+", caplog.text))
    lines = [json.loads(message) for message in caplog.messages]
    assert [line.get("param") for line in lines] == ["(unknown)", "temperature"]
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])


async def test_metrics_tell_the_state_of_admission_and_the_memory_of_replicas(client, router, fleet, backend):
    load = Load(num_blocks=10, num_free_blocks=7, num_cached_blocks=3, block_bytes=1000)
    fleet.put(replace(backend.card, load=load), backend)
    tickets = [router.admission.enter() for _ in range(NUM_PLACES)]
    tickets[0].grow({"tiny": 1})
    await client.post("/v1/completions", json=BODY)
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    found = {
        (sample.name, sample.labels.get("state", sample.labels.get("reason"))): sample.value
        for family in families
        for sample in family.samples
    }
    states = ("budget", "used", "cached")
    assert [found["serve_app_replica_kv_bytes", state] for state in states] == [10_000, 3_000, 3_000]
    assert found["serve_app_admission_requests_open", None] == NUM_PLACES
    assert found["serve_app_admission_sequences", None] == 1
    assert found["serve_app_admission_places", None] == NUM_PLACES
    assert found["serve_app_admission_refusals_total", "places"] == 1
    assert found["serve_app_admission_predicted_wait_seconds", None] == 0


async def test_a_greedy_tenant_leaves_the_others_room_and_every_refusal_says_when_to_come() -> None:
    """Seventy at once of one tenant, who comes again whatever it is told; five others ask one by one, and obey."""
    names = [f"t{number}" for number in range(5)]
    door = Door(identify=lambda key: Identity(tenant=Tenant(name=key or ""), key_id="key"))
    card = replace(model_card(), max_num_sequences=8, max_waiting=56)
    backend, crowded = FakeBackend(replica_card("r0", card), is_stepped=True), Fleet("router-0")
    crowded.put(backend.card, backend)
    answers: dict[str, list[httpx.Response]] = {name: [] for name in ("greedy", *names)}
    transport, num_steps = httpx.ASGITransport(build_app(Router(crowded), door=door)), 0

    async def ask(client: httpx.AsyncClient, name: str, count: int) -> None:
        body = BODY | {"stream": False, "max_tokens": 3}
        for _ in range(count):
            answers[name].append(await client.post("/v1/completions", json=body, headers={"x-api-key": name}))
            if answers[name][-1].status_code != 200:
                comes_at = num_steps + (1 if name == "greedy" else 6)  # of which a second has many more
                while num_steps < comes_at:  # noqa: ASYNC110
                    await asyncio.sleep(0)

    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        greedy = [asyncio.create_task(ask(client, "greedy", 10_000)) for _ in range(70)]
        await settle()
        others = [asyncio.create_task(ask(client, name, 12)) for name in names]
        while not all(task.done() for task in others):
            backend.step()
            num_steps += 1
            await settle()
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
    refused = {name: [each for each in of if each.status_code != 200] for name, of in answers.items()}
    assert {each.status_code for of in refused.values() for each in of} == {503}
    assert all(int(each.headers["retry-after"]) >= 1 for of in refused.values() for each in of)
    assert len(refused["greedy"]) > 100
    assert all(len(refused[name]) <= 1 for name in names), "who came when nobody knew of it, and was let in then"
    await crowded.close()


async def test_what_is_explained_is_one_of_the_requests_that_are_open(fleet, backend):
    admission = Admission(lambda: fleet.rooms, AdmissionSettings(max_open_requests=1))
    transport = httpx.ASGITransport(build_app(Router(fleet, admission=admission)))
    backend.submit_gate.clear()
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        asked = BODY | {"stream": False}
        first = asyncio.create_task(client.post("/v1/explain", json=asked))
        await settle()
        num_open = admission.num_open
        second = asyncio.create_task(client.post("/v1/explain", json=asked))
        await settle()
        backend.submit_gate.set()
        refused = await second
        assert (num_open, refused.status_code, refused.json()["error"]["error_code"]) == (1, 503, "overloaded")
        assert (await first).status_code == 200
        assert (await client.post("/v1/explain", json=asked | {"model": "nobody"})).status_code == 404
    assert admission.num_open == 0
