"""Requests that come again under their `Idempotency-Key`: the same bytes, computed once, whoever left meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping, Sequence
from dataclasses import dataclass, field

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from serve_app.api.listings import LimitState
from serve_app.core.errors import EngineFailed, Unavailable
from serve_app.core.tenants import Identity, Meter, Scope, Tenant
from serve_app.http.app import build_app
from serve_app.http.exchange import rate_headers
from serve_app.http.guard import Door
from serve_app.http.idempotency import Idempotent
from serve_app.http.metrics import Served
from serve_app.http.settings import HttpSettings
from serve_app.router.fleet import Fleet
from serve_app.router.idempotency import LOST_S, Claim, Claimed, Claims, Message, Recording, Replays, ReplaySettings
from serve_app.router.quotas import Rates
from serve_app.router.router import Router
from tests.fakes import FakeBackend, settle

BODY = {"model": "tiny", "prompt": "a b", "max_tokens": 5}
STREAM = BODY | {"stream": True}


@dataclass(slots=True)
class LocalBook:
    """The one book, as a router of that name reaches it.

    fails: so many calls do not come to it;  loses: so many claims come to it, and what it says is lost
    answering: attempts that were not left
    """

    claims: Claims
    name: str
    fails: int = 0
    loses: int = 0
    answering: set[str] = field(default_factory=set)

    async def claim(self, claim: Claim) -> Claimed:
        self.answering.add(claim.attempt)
        self._fail()
        found = self.claims.claim(claim, self.name)
        if self.loses:
            self.loses -= 1
            self.fails = 1
            self._fail()
        return found

    async def deliver(self, claim: Claim, answer: Sequence[Message] | None) -> None:
        self._fail()
        self.claims.deliver(claim, self.name, answer)

    def leave(self, claim: Claim) -> None:
        self.answering.remove(claim.attempt)

    def _fail(self) -> None:
        if self.fails:
            self.fails -= 1
            raise Unavailable("Accounts do not answer; retry.", None, {"retry_after_s": 2})


@dataclass(slots=True)
class Asking:
    """Clients of two tenants, and of two routers that share one book where they are asked to."""

    backend: FakeBackend
    client: httpx.AsyncClient
    app: ASGIApp
    replays: Replays
    book: LocalBook
    now: float = 0.0
    added: int = 1
    other: httpx.AsyncClient = field(init=False)

    def post(
        self, body: dict[str, object], key: str = "k", tenant: str = "a", *, router: int = 0, **beside: str
    ) -> asyncio.Task[httpx.Response]:
        headers = {"idempotency-key": key, "x-api-key": tenant, **beside}
        client = (self.client, self.other)[router]
        return asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))

    async def counted(self, name: str, label: str) -> float:
        """What the first router has counted of it."""
        lines = (await self.client.get("/metrics", headers={"x-api-key": "watcher"})).text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(f"serve_app_{name}{{") and label in line
        )

    async def step_to_the_end(self) -> None:
        while self.backend.num_live:
            self.backend.step()
            await asyncio.sleep(0)

    @property
    def num_computed(self) -> int:
        return len(self.backend.submissions)


@pytest.fixture(params=[False, True], ids=["by itself", "stepped"])
async def asking(request: pytest.FixtureRequest) -> AsyncIterator[Asking]:
    backend, fleet = FakeBackend(is_stepped=request.param), Fleet("router-0")
    fleet.put(backend.card, backend)
    bounds = ReplaySettings(seconds=60, max_answers=3, max_bytes=10_000)
    replays = Replays(bounds, clock=lambda: made.now)

    def identify(key: str | None) -> Identity:
        tenant = Tenant(name=key or "", added=made.added)
        return Identity(tenant=tenant, key_id="key", scopes=frozenset(Scope))

    door = Door(identify=identify)
    claims = Claims(clock=lambda: made.now, settings=bounds)
    book = LocalBook(claims, "router-0")
    settings = HttpSettings(max_stall_s=0.05)
    app = build_app(Router(fleet), settings, door=door, replays=replays, book=book)
    made = Asking(backend, httpx.AsyncClient(timeout=60), app, replays, book)
    beside, others = Fleet("router-1"), Replays(ReplaySettings(seconds=60), clock=lambda: made.now)
    beside.put(backend.card, backend)
    another = build_app(Router(beside), door=door, replays=others, book=LocalBook(claims, "router-1"))
    made.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://flow")
    made.other = httpx.AsyncClient(transport=httpx.ASGITransport(app=another), base_url="http://flow")
    yield made
    for each in (made.client, made.other, fleet, beside):
        await (each.close() if isinstance(each, Fleet) else each.aclose())


by_itself = pytest.mark.parametrize("asking", [False], indirect=True)
stepped = pytest.mark.parametrize("asking", [True], indirect=True)


@by_itself
@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_repeat_gets_the_same_bytes_and_nothing_is_computed_again(
    asking: Asking, body: dict[str, object]
) -> None:
    answers = [await asking.post(body) for _ in range(5)]
    assert (len({each.content for each in answers}), asking.num_computed) == (1, 1)
    assert {each.status_code for each in answers} == {200}
    assert ["idempotency-replayed" in each.headers for each in answers] == [False, True, True, True, True]


@stepped
@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_client_that_left_finds_what_was_computed_meanwhile(asking: Asking, body: dict[str, object]) -> None:
    left = asking.post(body)
    while not asking.backend.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    asking.backend.step()
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    again = [asking.post(body) for _ in range(4)]
    await settle(100)
    assert asking.backend.num_live == 1
    while asking.backend.num_live:
        asking.backend.step()
        await asyncio.sleep(0)
    answers = await asyncio.gather(*again)
    assert (len({each.content for each in answers}), asking.num_computed) == (1, 1)
    assert b"w4" in answers[0].content


@by_itself
async def test_keys_are_each_tenants_own_and_of_one_request(asking: Asking) -> None:
    await asking.post(BODY)
    assert "idempotency-replayed" not in (await asking.post(BODY, tenant="b")).headers
    other = await asking.post(BODY | {"max_tokens": 6})
    assert (other.status_code, other.json()["error"]["error_code"]) == (422, "idempotency_key_reused")
    wrong = await asking.post(BODY, key="x" * 256)
    assert wrong.status_code == 400
    assert asking.num_computed == 2


@by_itself
async def test_a_tenant_under_the_name_of_a_removed_one_finds_no_answer_of_it(asking: Asking) -> None:
    await asking.post(BODY)
    asking.added = 7
    for router in (0, 1):
        assert ("idempotency-replayed" in (await asking.post(BODY, router=router)).headers) is (router == 1)
    assert asking.num_computed == 2


@by_itself
async def test_what_failed_is_tried_again(asking: Asking) -> None:
    asking.backend.refusal = EngineFailed("no")
    assert (await asking.post(BODY)).status_code == 500
    asking.backend.refusal = None
    assert (await asking.post(BODY)).status_code == 200


@stepped
async def test_who_has_more_time_than_the_first_asks_again(asking: Asking) -> None:
    hurried = asking.post(BODY, **{"x-request-timeout": "0.5"})
    while not asking.backend.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    patient = [asking.post(BODY) for _ in range(3)]
    assert (await hurried).status_code == 504
    async with asyncio.timeout(60):
        while not all(each.done() for each in patient):
            await asking.step_to_the_end()
            await asyncio.sleep(0)
    assert {each.status_code for each in await asyncio.gather(*patient)} == {200}
    assert asking.num_computed == 2, "one of those who had more time asked for all of them"


@by_itself
async def test_an_answer_is_kept_for_its_time(asking: Asking) -> None:
    await asking.post(BODY)
    asking.now = 59.9
    await asking.post(BODY)
    assert asking.num_computed == 1
    asking.now = 60.0
    await asking.post(BODY)
    assert asking.num_computed == 2


@by_itself
async def test_what_is_kept_of_a_tenant_is_bounded_in_number_and_bytes(asking: Asking) -> None:
    for number in range(10):
        await asking.post(BODY, key=str(number))
    await asking.post(BODY, key="9")
    assert asking.num_computed == 10
    await asking.post(BODY, key="0")
    assert asking.num_computed == 11
    assert asking.replays._kept.num_bytes > 0
    for number in range(20, 30):
        await asking.post(BODY | {"max_tokens": 40, "n": 20}, key=str(number))
        assert asking.replays._kept.num_bytes <= 10_000


async def test_what_is_kept_of_all_tenants_is_bounded_and_what_is_old_goes_whoever_asks() -> None:
    now = 0.0
    replays = Replays(ReplaySettings(seconds=60), clock=lambda: now, max_total_bytes=5000)

    def answer(tenant: str) -> None:
        recording = replays.begin(claim_of("k", tenant))
        recording.add({"type": "http.response.body", "body": b"x" * 600})
        replays.end(claim_of("k", tenant), is_kept=True)

    for number in range(20):
        answer(f"tenant-{number}")
        assert replays._kept.num_bytes <= 5000
    assert [replays._kept._bytes[f"tenant-{number}"] for number in (14, 15, 19)] == [0, 1000, 1000]
    running = replays.begin(claim_of("other", "tenant-15"))
    now = 60.0
    answer("another")
    assert replays._kept._bytes == {"another": 1000}
    assert replays.find(claim_of("other", "tenant-15")) is running


async def test_what_is_kept_is_told_as_long_as_it_is_good() -> None:
    now = 0.0
    replays = Replays(ReplaySettings(seconds=60), clock=lambda: now)
    for key in ("whole", "failed", "running"):
        recording = replays.begin(claim_of(key))
        recording.add({"type": "http.response.body", "body": b"x"})
        if key != "running":
            replays.end(claim_of(key), is_kept=key == "whole")
    now = 10.0
    [(kept, seconds)] = replays.kept()
    assert (kept.claim, seconds) == (claim_of("whole"), 50.0)
    assert kept.messages == ({"type": "http.response.body", "body": b"x"},)
    now = 60.0
    assert replays.kept() == []


async def test_followers_have_what_they_follow_to_the_end_though_it_is_not_kept() -> None:
    replays = Replays(ReplaySettings(max_bytes=0))
    recording = replays.begin(claim_of("k"))
    following = asyncio.create_task(_all(recording))
    await asyncio.sleep(0)
    recording.add({"type": "http.response.start"})
    recording.add({"type": "http.response.body", "body": b"x"})
    replays.end(claim_of("k"), is_kept=True)
    assert (len(await following), replays.find(claim_of("k"))) == (2, None)


def claim_of(key: str, tenant: str = "a") -> Claim:
    return Claim(tenant=tenant, key=key, fingerprint=b"f", attempt="1", seconds=60.0)


async def _all(recording: Recording) -> list[object]:
    return [message async for message in recording.messages()]


@by_itself
@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_repeat_at_another_router_gets_the_same_bytes_and_nothing_is_computed_again(
    asking: Asking, body: dict[str, object]
) -> None:
    answers = [await asking.post(body, router=number % 2) for number in range(4)]
    assert (len({each.content for each in answers}), asking.num_computed) == (1, 1)
    assert ["idempotency-replayed" in each.headers for each in answers] == [False, True, True, True]
    assert not asking.book.answering
    other = await asking.post(body | {"max_tokens": 6}, router=1)
    assert (other.status_code, other.json()["error"]["error_code"]) == (422, "idempotency_key_reused")
    assert "idempotency-replayed" not in (await asking.post(body, tenant="b", router=1)).headers


@pytest.mark.law("One answer")
@stepped
@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_repeat_at_another_router_waits_for_what_is_still_computed(
    asking: Asking, body: dict[str, object]
) -> None:
    first = asking.post(body)
    while not asking.backend.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    again = [asking.post(body, router=1) for _ in range(3)]
    await settle(100)
    assert (asking.backend.num_live, len(asking.book.answering)) == (1, 1)
    await asking.step_to_the_end()
    answers = await asyncio.gather(first, *again)
    assert not asking.book.answering
    assert (len({each.content for each in answers}), asking.num_computed) == (1, 1)


@by_itself
async def test_what_failed_at_one_router_is_tried_again_at_another(asking: Asking) -> None:
    asking.backend.refusal = EngineFailed("no")
    assert (await asking.post(BODY)).status_code == 500
    asking.backend.refusal = None
    await asyncio.sleep(0)
    assert (await asking.post(BODY, router=1)).status_code == 200
    assert "idempotency-replayed" in (await asking.post(BODY)).headers


@stepped
async def test_what_a_router_left_behind_is_answered_by_another(asking: Asking) -> None:
    first = asking.post(BODY)
    while not asking.backend.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    again = asking.post(BODY, router=1)
    asking.now += LOST_S - 0.1
    await settle(100)
    assert asking.num_computed == 1
    asking.now += 0.1  # nothing was heard of the first since it began
    while asking.num_computed < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asking.step_to_the_end()
    assert (await again).status_code == 200
    await first


@by_itself
async def test_where_the_book_cannot_be_reached_nothing_is_computed_under_a_key(asking: Asking) -> None:
    asking.book.fails = 1
    refused = await asking.post(BODY)
    assert (refused.status_code, refused.headers["retry-after"], asking.num_computed) == (503, "2", 0)
    assert (await asking.post(BODY)).status_code == 200


@by_itself
async def test_a_claim_whose_answer_was_lost_is_given_back(asking: Asking) -> None:
    asking.book.loses = 1
    assert ((await asking.post(BODY)).status_code, asking.num_computed) == (503, 0)
    assert (await asyncio.wait_for(asking.post(BODY, router=1), 60)).status_code == 200
    assert not asking.book.answering


async def test_a_repeat_tells_how_the_limits_stand_now() -> None:
    left = [7]

    async def answer(scope: AsgiScope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/plain"), *rate_headers(rates())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"once"})
        scope["state"]["served"] = Served(status=200, run=None)

    def rates() -> Rates:
        return {Meter.REQUESTS: LimitState(limit=9, remaining=left[0], reset_s=1.0)}

    made = Idempotent(answer, Replays(), max_body_bytes=100, rates=rates)

    async def known(scope: AsgiScope, receive: Receive, send: Send) -> None:
        scope["state"] = {"identity": Identity(tenant=Tenant(name="a")), "request_id": "r"}
        await made(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=known), base_url="http://flow") as client:
        first = await client.post("/", headers={"idempotency-key": "k"})
        left[0] = 3
        again = await client.post("/", headers={"idempotency-key": "k"})
    assert (first.content, again.content, again.headers["idempotency-replayed"]) == (b"once", b"once", "true")
    assert [each.headers.get_list("x-ratelimit-remaining-requests") for each in (first, again)] == [["7"], ["3"]]
    assert again.headers["content-type"] == "text/plain"


async def test_a_claim_whose_computation_raised_is_given_back() -> None:
    claims = Claims(clock=lambda: 0.0)

    async def fail(scope: AsgiScope, receive: Receive, send: Send) -> None:
        raise RuntimeError("no")

    book = LocalBook(claims, "router-0")
    app = Idempotent(fail, Replays(), max_body_bytes=100, book=book)
    identity = Identity(tenant=Tenant(name="a"), key_id="key")
    state = {"identity": identity, "request_id": "r"}
    scope = {"type": "http", "path": "/v1/x", "headers": [(b"idempotency-key", b"k")], "state": state}
    bodies = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> dict[str, object]:
        if not bodies:
            await asyncio.Event().wait()
        return bodies.pop()

    async def send(message: object) -> None:
        raise AssertionError

    with pytest.raises(EngineFailed):
        await app(scope, receive, send)
    await asyncio.sleep(0)
    assert not claims._running
    assert not book.answering


@dataclass(slots=True)
class ByHand:
    """A client that reads message by message, or nothing at all, and leaves when it likes."""

    app: ASGIApp
    body: dict[str, object] = field(default_factory=lambda: STREAM)
    reads: bool = True
    key: str = "k"
    got: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    _is_sent: bool = False

    async def run(self) -> None:
        """Ends with the application, and as that does."""
        headers = [
            (b"content-type", b"application/json"),
            (b"idempotency-key", self.key.encode()),
            (b"x-api-key", b"a"),
        ]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("flow", 80),
        }  # fmt: skip
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": json.dumps(self.body, separators=(",", ":")).encode()}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, object]) -> None:
        if not self.reads:
            await asyncio.Event().wait()
        self.got.put_nowait(message)


@stepped
async def test_a_client_that_leaves_within_a_stream_that_it_follows_is_no_failure(asking: Asking) -> None:
    first = asking.post(STREAM)
    while not asking.backend.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    leaving = ByHand(asking.app)
    left = asyncio.create_task(leaving.run())
    asking.backend.step()
    await leaving.got.get()
    leaving.leaves.set()
    await left
    await asking.step_to_the_end()
    assert (await first).status_code == 200
    assert await asking.counted("requests_total", 'status="499"') == 1


@stepped
async def test_what_is_computed_for_a_client_that_left_is_counted(asking: Asking) -> None:
    leaving = ByHand(asking.app)
    left = asyncio.create_task(leaving.run())
    while not asking.backend.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    asking.backend.step()
    await leaving.got.get()
    leaving.leaves.set()
    await asking.step_to_the_end()
    await left
    assert await asking.counted("completion_tokens_total", 'model="tiny"') == 5


@by_itself
@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_client_that_reads_nothing_is_given_up(asking: Asking, body: dict[str, object]) -> None:
    for _ in range(2):  # the first of its key, and one that follows
        await asyncio.wait_for(ByHand(asking.app, body, reads=False).run(), 30)
    assert (await asking.post(body)).headers["idempotency-replayed"] == "true"
    assert asking.num_computed == 1
