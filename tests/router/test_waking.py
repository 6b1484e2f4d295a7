"""A request for a sleeping model wakes it once, waits for it, and is told the time where that is too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from serve_app.core.cards import ModelCard
from serve_app.core.errors import ModelLoading, Unavailable
from serve_app.http.app import build_app
from serve_app.router import waking
from serve_app.router.admission import Admission, AdmissionSettings
from serve_app.router.fleet import Fleet
from serve_app.router.published_sources import MemorySource
from serve_app.router.publishing import Publishing
from serve_app.router.router import Router
from serve_app.router.waking import Waker
from serve_app.tenants.published import Change
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card, settle

CONFIGURED = ModelCard(name="sleepy", root="models/sleepy", created=0, max_model_len=0, vocab_size=0)


class Bed:
    """A fleet with an awake model and a sleeping one, whose replica comes when the test says so."""

    def __init__(self, max_wait_s: float = 30.0) -> None:
        self.now = 100.0
        self.fleet = Fleet("router-0", aliases={"fast": "sleepy:sql"})
        self.woken: list[str] = []
        self.comes = asyncio.Event()
        self.waker = Waker(self.fleet, self.wake, clock=lambda: self.now)
        settings = AdmissionSettings(max_wait_s=max_wait_s)
        self.admission = Admission(lambda: self.fleet.rooms, settings)
        self.router = Router(self.fleet, admission=self.admission, waker=self.waker)
        self.put("awake")
        self.fleet.expect(["awake", "sleepy"])
        self.fleet.rest("sleepy", CONFIGURED)

    def put(self, name: str) -> None:
        backend = FakeBackend(replica_card(f"replica-of-{name}", model_card(name, adapter_card("sql"))))
        self.fleet.put(backend.card, backend)

    async def wake(self, model: str) -> None:
        self.woken.append(model)
        await self.comes.wait()
        self.put(model)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(self.router)), base_url="http://test")


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    bed = Bed()
    yield bed
    await bed.fleet.close()


def body(model: str) -> dict[str, object]:
    return {"model": model, "prompt": "once", "max_tokens": 3}


async def test_a_sleeping_model_is_listed_and_counts_as_healthy(bed: Bed) -> None:
    async with bed.client() as client:
        assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == [
            "awake",
            "awake:sql",
            "sleepy",
        ]
        assert (await client.get("/v1/models/sleepy")).json()["max_model_len"] is None
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/live")).json()["asleep"] == ["sleepy"]
        assert (await client.get("/live")).json()["loading"] == []
    assert bed.woken == []


async def test_a_sleeping_model_that_was_never_seen_is_listed_as_it_is_configured_and_published(bed: Bed) -> None:
    configured = replace(CONFIGURED, max_model_len=256, adapters=(adapter_card("old", ""), adapter_card("sql", "")))
    source = MemorySource()
    publishing = Publishing(bed.fleet, source)
    for name in ("sql", "live"):
        await source.change_adapters(Change(action="publish", base="sleepy", name=name, version=f"{name}-1"))
    await source.change_adapters(Change(action="withdraw", base="sleepy", name="old", served=("", "")))
    publishing.rest("sleepy", configured)
    async with bed.client() as client:
        listed = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
        assert [each for each in listed if "awake" not in each] == ["sleepy", "sleepy:live", "sleepy:sql", "fast"]
        assert [listed[f"sleepy:{name}"]["version"] for name in ("live", "sql")] == ["live-1", "sql-1"]
        assert (listed["sleepy"]["root"], listed["sleepy"]["max_model_len"]) == ("models/sleepy", 256)
        publishing.rest("sleepy", None)
        assert (await client.get("/live")).json()["asleep"] == []


async def test_a_model_that_fell_asleep_is_listed_as_it_was(bed: Bed) -> None:
    async with bed.client() as client:
        bed.put("sleepy")
        before = (await client.get("/v1/models")).json()
        bed.fleet.remove("replica-of-sleepy")
        assert (await client.get("/v1/models")).json() == before
        assert "fast" in {each["id"] for each in before["data"]}


async def test_a_service_whose_models_all_sleep_is_healthy() -> None:
    fleet = Fleet("router-0")
    fleet.expect(["sleepy"])
    assert (fleet.is_ready, fleet.loading) == (False, ["sleepy"])
    fleet.rest("sleepy", CONFIGURED)
    assert (fleet.is_ready, fleet.loading) == (True, [])
    fleet.expect(["sleepy"], failed=["sleepy"])
    assert (fleet.is_ready, list(fleet.asleep)) == (False, [])
    fleet.expect([])
    assert list(fleet.asleep) == []


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", body("sleepy")),
        ("/v1/completions", body("sleepy:sql")),
        ("/v1/completions", body("fast")),
        ("/v1/chat/completions", {"model": "sleepy", "messages": [{"role": "user", "content": "once"}]}),
        ("/tokenize", {"model": "sleepy", "content": "once"}),
        ("/v1/explain", body("sleepy")),
    ],
)
async def test_the_first_request_wakes_the_model_and_is_answered(bed: Bed, path: str, content: object) -> None:
    async with bed.client() as client:
        answer = asyncio.create_task(client.post(path, json=content))
        await settle()
        assert (bed.woken, answer.done()) == (["sleepy"], False)
        bed.comes.set()
        response = await answer
    assert response.status_code == 200, response.text
    assert bed.admission.num_open == 0


async def test_many_requests_wake_a_model_once_and_hold_up_nobody_elses(bed: Bed) -> None:
    async with bed.client() as client:
        answers = [asyncio.create_task(client.post("/v1/completions", json=body("sleepy"))) for _ in range(100)]
        await settle()
        assert bed.woken == ["sleepy"]
        assert (await client.post("/v1/completions", json=body("awake"))).status_code == 200
        bed.comes.set()
        assert {response.status_code for response in await asyncio.gather(*answers)} == {200}
    assert bed.woken == ["sleepy"]


async def test_questions_about_a_model_do_not_wake_it(bed: Bed) -> None:
    async with bed.client() as client:
        for path in ("/props?model=sleepy", "/tokenizer_info?model=sleepy", "/v1/models"):
            await client.get(path)
        found = await client.get("/props?model=sleepy")
    assert (found.status_code, found.json()["error"]["error_code"]) == (503, "model_loading")
    assert "a request for a completion wakes it" in found.text
    assert bed.woken == []


async def test_a_request_that_waited_long_enough_is_told_when_the_model_is_ready() -> None:
    bed = Bed(max_wait_s=0.01)
    async with bed.client() as client:
        first = await client.post("/v1/completions", json=body("sleepy"))
        assert (first.status_code, first.json()["error"]["error_code"]) == (503, "model_loading")
        assert first.headers["retry-after"] == "5"  # nobody has seen how long it takes
        bed.now += 40
        bed.comes.set()
        await settle()
        bed.fleet.remove("replica-of-sleepy")
        bed.comes.clear()
        again = await client.post("/v1/completions", json=body("sleepy"))
        assert again.headers["retry-after"] == "40"
        bed.now += 15
        later = await client.post("/v1/completions", json=body("sleepy"))
        assert later.headers["retry-after"] == "25"
    assert bed.woken == ["sleepy", "sleepy"]
    assert bed.admission.num_open == 0
    await bed.fleet.close()


async def test_no_more_than_so_many_wait_for_one_model(bed: Bed) -> None:
    async with bed.client() as client:
        num_asked = waking.MAX_WAITING + 3
        answers = [asyncio.create_task(client.post("/v1/completions", json=body("sleepy"))) for _ in range(num_asked)]
        await settle()
        assert sum(each.done() for each in answers) == 3
        bed.comes.set()
        statuses = [response.status_code for response in await asyncio.gather(*answers)]
    assert (statuses.count(200), statuses.count(503)) == (waking.MAX_WAITING, 3)


async def test_a_router_that_is_stopped_tells_those_who_wait(bed: Bed) -> None:
    async with bed.client() as client:
        answer = asyncio.create_task(client.post("/v1/completions", json=body("sleepy")))
        await settle()
        bed.admission.stop(Unavailable("The server is being stopped; retry.", None, {"retry_after_s": 5}))
        assert (await answer).status_code == 503


async def test_nobody_waits_where_nothing_can_be_woken(bed: Bed) -> None:
    with pytest.raises(ModelLoading, match="is asleep"):
        await Waker(bed.fleet).once_awake(lambda: bed.fleet.resolve("sleepy"), max_wait_s=60)


async def test_a_ticket_that_rests_is_in_no_models_count(bed: Bed) -> None:
    ticket = bed.router.enter()
    await ticket.turn()
    with ticket.resting():
        assert (bed.admission.num_open, bed.admission._unknown.total()) == (1, 0)
    assert bed.admission._unknown.total() == 1
    ticket.give_back()
    assert (bed.admission.num_open, bed.admission._unknown.total()) == (0, 0)
