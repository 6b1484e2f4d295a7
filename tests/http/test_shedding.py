"""A proxy that is full refuses in its protocol, byte for byte right, and what only looks passes."""

from __future__ import annotations

import asyncio
import json
import select
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.server import ServerState

from serve_app.api.dialects import DIALECTS, UNION
from serve_app.core.tenants import Identity, Tenant
from serve_app.http.caller import MAX_IN_A_ROW
from serve_app.http.failures import REQUEST_ID
from serve_app.http.proxy import protect, protocol_of
from serve_app.http.refusals import error_response
from serve_app.http.shedding import MAX_DROPPED_BYTES, Shedding
from serve_app.http.slots import TellsSlots
from serve_app.http.turnstile import MAX_READ_ON_PER_S, MIN_HANDED_ON, Turnstile, TurnstileSettings
from serve_app.http.written_refusals import WrittenRefusals
from serve_app.router.fleet import Fleet
from tests.fakes import FakeBackend, model_card, replica_card
from tests.http.full_proxy import (
    BODY,
    CHUNKED,
    COUNTED,
    HEALTH,
    HOST,
    Busy,
    Echo,
    Line,
    closing,
    post,
    settle,
    statuses,
)


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(),
        post(b"Content-Length: 0\r\n\r\n"),
        post(b"\r\n"),
        post(b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED),
        post(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n" + COUNTED),
    ],
    ids=["counted", "empty", "bodiless", "chunked", "offering an upgrade"],
)
async def test_a_refusal_and_what_follows_it_are_the_same_wherever_the_bytes_are_cut(request_bytes: bytes) -> None:
    sent = request_bytes + HEALTH
    turnstile, app = Busy(pause_s=0), Echo()
    written = await Line(turnstile, app).send_all(sent)
    assert statuses(written) == [503, 200]
    body = json.loads(written.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1 200")[0])
    assert body["error"]["error_code"] == "overloaded"
    for cut in range(1, len(sent)):
        other = await Line(turnstile, app).send_all(sent[:cut], sent[cut:])
        assert statuses(other) == [503, 200], f"cut at {cut}"
    single = await Line(turnstile, app).send_all(*(sent[at : at + 1] for at in range(len(sent))))
    assert statuses(single) == [503, 200]
    assert turnstile.num_inside == 1


async def test_the_connection_goes_on_and_is_served_once_there_is_room() -> None:
    turnstile = Busy()
    line = Line(turnstile, Echo())
    assert statuses(await line.send_all(post(b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED))) == [503]
    turnstile.make_room()
    written = await line.send_all(post())
    assert statuses(written) == [503, 200]
    assert written.endswith(BODY)
    assert turnstile.num_inside == 0


@pytest.mark.parametrize("name", sorted(DIALECTS))
async def test_it_says_what_the_application_would_say_in_each_dialect(name: str) -> None:
    turnstile = Busy()
    line = Line(turnstile, Echo())
    line.protocol.server_state.default_headers = [(b"server", b"uvicorn")]
    written = await line.send_all(post(b"x-completions-dialect: %b\r\n" % name.encode() + COUNTED))
    head, _, body = written.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    headers = dict(each.split(b": ", 1) for each in lines[1:])
    expected = error_response(turnstile.refusal(int(headers[b"retry-after"])), DIALECTS[name])
    assert lines[0] == b"http/1.1 %d service unavailable" % expected.status_code
    assert headers == dict(expected.raw_headers) | {b"x-request-id": b"mine", b"server": b"uvicorn"}
    assert body == expected.body


async def test_an_unknown_dialect_and_a_malformed_request_id_are_not_taken_over() -> None:
    headers = b"X-Completions-Dialect: klingon\r\nContent-Length: 0\r\n"
    request = b"POST /completion HTTP/1.1\r\nHost: x\r\nX-Request-Id: not/one\r\n" + headers + b"\r\n"
    head = (await Line(Busy(), Echo()).send_all(request)).partition(b"\r\n\r\n")[0].decode()
    assert f"x-completions-dialect: {UNION.name}" in head
    sent = head.partition("x-request-id: ")[2].split("\r\n")[0]
    assert REQUEST_ID.fullmatch(sent)
    assert sent != "not/one"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (post(path=b"/v1/completions/"), 503),
        (post(path=b"/completion?a=b"), 503),
        (post(path=b"http://x/completions"), 503),
        (post(path=b"/v1/%63ompletions"), 503),
        (post(path=b"/tokenize"), 503),
        (post(path=b"/detokenize"), 503),
        (post(path=b"/v1/nothing"), 200),
        (HEALTH, 200),
        (HEALTH.replace(b"/health", b"/metrics"), 200),
        (b"OPTIONS /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n\r\n", 200),  # a page's preflight
    ],
)
async def test_what_computes_is_refused_however_it_is_spelled_and_nothing_else_is(
    request_bytes: bytes, status: int
) -> None:
    assert statuses(await Line(Busy(), Echo()).send_all(request_bytes)) == [status]


@pytest.mark.parametrize(
    "request_bytes", [post(b"Connection: close\r\n" + COUNTED), post(version=b"1.0")], ids=["close", "1.0"]
)
async def test_a_connection_that_is_not_kept_is_closed_behind_the_whole_request(request_bytes: bytes) -> None:
    line = Line(Busy(), Echo())
    written = await line.send_all(request_bytes[:-1])
    assert statuses(written) == [503]
    assert b"\r\nconnection: close\r\n" in written
    assert not line.wire.is_closing(), "an answer is lost where bytes are left unread"
    assert await line.send_all(request_bytes[-1:] + HEALTH) == written, "nothing behind it is answered"
    assert line.wire.is_closing()


async def test_a_body_that_is_only_offered_is_not_asked_for() -> None:
    line = Line(Busy(), Echo())
    written = await line.send_all(post(b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n"))
    assert statuses(written) == [503]
    assert b"\r\nconnection: close\r\n" in written
    assert await line.send_all(HEALTH[:9]) == written, "the body, whatever it looks like"
    assert line.wire.is_closing()


class Hasty(Shedding):
    drop_timeout_s = 0.01


def hasty(turnstile: Turnstile) -> Callable[..., Shedding]:
    return partial(Hasty, turnstile=turnstile, refusals=WrittenRefusals(turnstile.refusal))


@pytest.mark.parametrize(
    ("headers", "piece"),
    [
        (b"Content-Length: %d\r\n\r\n" % (MAX_DROPPED_BYTES + 1), b"x" * 2000),  # announced
        (b"Transfer-Encoding: chunked\r\n\r\n", b"400\r\n" + b"x" * 1024 + b"\r\n"),  # or not
    ],
)
async def test_of_a_body_without_end_no_more_is_read_than_the_bound(headers: bytes, piece: bytes) -> None:
    turnstile = Busy()
    line = Line(turnstile, Echo(), hasty(turnstile))
    written = await line.send_all(post(headers))
    for _ in range(2 * MAX_DROPPED_BYTES // len(piece)):
        line.send(piece)
    assert line.wire.written == written
    assert line.protocol.cycle is None, "no task was made, and nothing keeps the body"
    assert line.protocol._num_dropped <= MAX_DROPPED_BYTES + len(piece)
    await closing(line)


async def test_a_body_that_does_not_come_closes_its_connection() -> None:
    turnstile = Busy()
    line = Line(turnstile, Echo(), hasty(turnstile))
    written = await line.send_all(post()[:-1])
    await closing(line)
    assert line.wire.written == written


async def test_nonsense_behind_a_refusal_is_not_answered_again() -> None:
    line = Line(Busy(), Echo())
    request = post(b"Transfer-Encoding: chunked\r\n\r\nno number\r\n")
    assert statuses(await line.send_all(request + HEALTH, HEALTH)) == [503]


async def test_requests_in_one_piece_are_answered_in_their_order() -> None:
    turnstile, app = Busy(), Echo()
    turnstile.make_room()
    line = Line(turnstile, app)
    first = post(b"Content-Length: 5\r\n\r\nfirst")
    app.may_answer.clear()
    line.send(first + post() + HEALTH + first)
    await settle()
    assert line.wire.written == b""
    turnstile.settings = TurnstileSettings(max_requests=2)
    turnstile.fill()
    turnstile.settings = TurnstileSettings(max_requests=1)
    app.may_answer.set()
    await settle()
    assert statuses(line.wire.written) == [200, 503, 200, 503]
    assert line.wire.written.count(b"\r\nx-request-id: mine\r\n") == 2
    assert turnstile.num_inside == 1


@pytest.mark.parametrize(("how", "num_answered"), [("answered", 2), ("left", 0), ("failed", 2)])
async def test_whoever_passes_leaves_again_whatever_becomes_of_it(how: str, num_answered: int) -> None:
    turnstile, app = Turnstile(TurnstileSettings(max_requests=2)), Echo()
    lines = [Line(turnstile, app) for _ in range(3)]
    app.may_answer.clear()
    app.fails = how == "failed"
    for line in lines:  # in one turn of the loop: none of their tasks has begun when the next one comes
        line.send(post())
    assert (turnstile.num_inside, statuses(lines[2].wire.written)) == (2, [503])
    await settle()
    if how == "left":
        for line in lines:
            line.lose()
    app.may_answer.set()
    await settle()
    assert (turnstile.num_inside, app.num_asked) == (0, 2)
    assert [bool(line.wire.written) for line in lines[:2]] == [num_answered > 0] * 2


async def test_no_more_are_handed_on_than_keep_the_replicas_busy_and_the_others_wait_in_their_order() -> None:
    turnstile, app = Turnstile(TurnstileSettings(max_requests=MIN_HANDED_ON + 3)), Echo()
    app.may_answer.clear()
    lines = [Line(turnstile, app) for _ in range(MIN_HANDED_ON + 3)]
    for line in lines:
        line.send(post())
    await settle()
    assert (app.num_asked, turnstile.num_inside) == (MIN_HANDED_ON, MIN_HANDED_ON + 3)
    lines[MIN_HANDED_ON].lose()  # one that waits, which nobody else has heard of
    assert (app.num_asked, turnstile.num_inside) == (MIN_HANDED_ON, MIN_HANDED_ON + 2)
    lines[0].lose()
    await settle()
    assert app.num_asked == MIN_HANDED_ON, "whoever left is only gone once the application knows"
    app.may_answer.set()
    await settle()
    assert app.num_asked == MIN_HANDED_ON + 2
    assert [statuses(line.wire.written) for line in lines[MIN_HANDED_ON + 1 :]] == [[200], [200]]
    assert turnstile.num_inside == 0


async def test_more_are_handed_on_where_the_router_tells_of_more_slots() -> None:
    turnstile, echo, fleet = Turnstile(TurnstileSettings(max_requests=1000)), Echo(), Fleet("router-0")
    for name in ("r0", "r1"):
        backend = FakeBackend(replica_card(name, replace(model_card(), max_num_sequences=100, max_waiting=10)))
        fleet.put(backend.card, backend)
    app: Any = TellsSlots(echo, fleet=fleet)
    assert statuses(await Line(turnstile, app).send_all(post())) == [200]
    assert not turnstile.flows.has_tenants
    echo.may_answer.clear()
    for _ in range(500):
        Line(turnstile, app).send(post())
    await settle()
    assert echo.num_asked == 1 + 1.5 * 200
    echo.may_answer.set()
    await settle()
    await fleet.close()


class Named:
    """An application that lets in the keys `a` and `b`, each a tenant's of that name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = dict(scope["headers"])[b"x-api-key"].decode()
        if key in ("a", "b"):
            scope.setdefault("state", {})["identity"] = Identity(tenant=Tenant(name=key), key_id=key)
        await self._app(scope, receive, send)


def keyed(key: bytes) -> bytes:
    return post(b"X-Api-Key: " + key + b"\r\n" + COUNTED)


async def test_tenants_are_told_apart_once_the_application_has_named_them() -> None:
    echo, fleet = Echo(), Fleet("router-0")
    app: Any = TellsSlots(Named(echo), fleet=fleet)
    turnstile = Turnstile(TurnstileSettings(max_requests=8))
    for key in (b"a", b"b"):
        assert statuses(await Line(turnstile, app).send_all(keyed(key))) == [200]
    echo.may_answer.clear()
    lines = [Line(turnstile, app) for _ in range(12)]
    for line in lines:
        line.send(keyed(b"a"))
    await settle()
    assert [statuses(line.wire.written) for line in lines] == [[]] * 6 + [[503]] * 6
    assert statuses(await Line(turnstile, app).send_all(keyed(b"made up"))) == []
    other = Line(turnstile, app)
    assert statuses(await other.send_all(keyed(b"b"))) == []
    echo.may_answer.set()
    await settle()
    assert statuses(other.wire.written) == [200]
    await fleet.close()


async def test_a_connection_that_comes_again_and_again_is_not_read_for_a_while() -> None:
    turnstile = Busy(pause_s=0.02)
    line = Line(turnstile, Echo())
    for _ in range(MAX_IN_A_ROW):
        assert not line.wire.is_paused
        await line.send_all(post())
    assert line.wire.is_paused
    while line.wire.is_paused:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    turnstile.make_room()
    assert statuses(await line.send_all(post())) == [503] * MAX_IN_A_ROW + [200]
    assert not line.wire.is_paused


async def test_of_very_many_that_are_refused_each_is_left_unread_after_one_refusal() -> None:
    seconds = 0.0
    turnstile = Busy(clock=lambda: seconds)
    num_read_on = 0
    while True:
        line = Line(turnstile, Echo())
        await line.send_all(post())
        if line.wire.is_paused:
            break
        num_read_on += 1
    assert num_read_on == MAX_READ_ON_PER_S
    seconds = 0.05
    for is_paused in [False] * round(0.05 * MAX_READ_ON_PER_S) + [True]:
        line = Line(turnstile, Echo())
        assert statuses(await line.send_all(post())) == [503]
        assert line.wire.is_paused is is_paused


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="this kernel tells of no end behind what is not read")
async def test_of_a_client_that_left_while_it_was_not_read_nothing_is_computed() -> None:
    turnstile, app = Busy(pause_s=0.2), Echo()
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    state = ServerState()

    def speak() -> asyncio.Protocol:
        return protocol_of(turnstile)(config=config, server_state=state, app_state={})

    server = await asyncio.get_running_loop().create_server(speak, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    for _ in range(MAX_IN_A_ROW):
        writer.write(post())
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
    writer.write(post())
    writer.close()
    await writer.wait_closed()
    turnstile.make_room()
    while state.connections:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert app.num_asked == 0
    server.close()


async def test_a_connection_that_was_served_in_between_has_been_patient() -> None:
    turnstile = Busy()
    line = Line(turnstile, Echo())
    for _ in range(3):
        await line.send_all(*[post()] * (MAX_IN_A_ROW - 1))
        turnstile.make_room()
        await line.send_all(post())
        turnstile.fill()
    assert not line.wire.is_paused


async def test_whom_the_application_sends_away_again_and_again_is_not_read_for_a_while() -> None:
    turnstile, app = Turnstile(TurnstileSettings(max_requests=2, pause_s=0.02)), Echo()
    line = Line(turnstile, app)
    app.refuses_with = 429, b"7"
    for number in range(2 * MAX_IN_A_ROW):
        if number % MAX_IN_A_ROW == MAX_IN_A_ROW - 1:
            app.refuses_with = None
        await line.send_all(post())
        app.refuses_with = 429, b"7"
    assert not line.wire.is_paused, "it was answered in between"
    for _ in range(MAX_IN_A_ROW):
        assert not line.wire.is_paused
        await line.send_all(post())
    assert line.wire.is_paused
    while line.wire.is_paused:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    app.refuses_with = None
    assert statuses(await line.send_all(post()))[-1] == 200
    assert not line.wire.is_paused
    assert turnstile.num_inside == 0


async def test_who_is_sent_away_without_being_told_until_when_is_read_on() -> None:
    app = Echo()
    line = Line(Turnstile(TurnstileSettings(max_requests=2)), app)
    app.refuses_with = 429, b"soon"
    assert statuses(await line.send_all(*[post()] * 9)) == [429] * 9
    assert not line.wire.is_paused


async def test_where_clients_share_connections_none_is_left_unread() -> None:
    line = Line(Busy(pause_s=0), Echo())
    assert statuses(await line.send_all(*[post()] * 20)) == [503] * 20
    assert not line.wire.is_paused


async def test_who_comes_early_keeps_the_appointment_and_the_others_are_told_later_ones() -> None:
    turnstile = Busy()
    line = Line(turnstile, Echo())
    for _ in range(500):  # five hundred other clients
        turnstile.refuse()
    await line.send_all(*[post()] * 3)
    told = [int(each.split(b"\r\n")[0]) for each in line.wire.written.split(b"retry-after: ")[1:]]
    assert told[0] > 1
    assert told == [told[0]] * 3
    assert turnstile.num_refused == 503


async def test_a_client_that_does_not_read_is_not_read() -> None:
    line = Line(Busy(pause_s=0), Echo())
    line.protocol.pause_writing()
    await line.send_all(post())
    assert line.wire.is_paused
    line.protocol.resume_writing()
    assert not line.wire.is_paused


async def test_the_next_request_that_passes_tells_how_many_were_refused() -> None:
    app = Echo()
    turnstile = Busy(max_requests=2, pause_s=0)
    line = Line(turnstile, app)
    await line.send_all(*[post()] * 3, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", post())
    turnstile.make_room()
    await line.send_all(post(), post())
    assert app.told == [3, 1, 0]


async def test_a_client_that_says_it_is_a_proxy_is_not_believed() -> None:
    app = Echo()
    lie = b"GET /health HTTP/1.1\r\nhost: x\r\nX-Serve-App-Refused: 77\r\n\r\n"
    await Line(Busy(), app).send_all(lie)
    assert app.told == [0]


def test_servers_that_a_proxy_starts_later_speak_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])  # given back afterwards
    monkeypatch.setattr(uvicorn.Server, "startup", uvicorn.Server.startup)  # so is this
    monkeypatch.setenv("SERVE_APP_PROXY_MAX_REQUESTS", "7")
    assert protect() == []
    config = uvicorn.Config(Echo(), log_config=None)
    config.load()
    first, second = (
        config.http_protocol_class(config=config, server_state=ServerState(), app_state={}, _loop=object())  # type: ignore[call-arg]
        for _ in range(2)
    )
    assert isinstance(first, Shedding)
    assert isinstance(second, Shedding)
    assert first._turnstile is second._turnstile
    assert first._turnstile.settings.max_requests == 7
