"""Connections that wait in the lobby: over real sockets, with uvicorn's server behind it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import uvicorn
import uvloop

from serve_app.http import header_limits, lobby
from serve_app.http.lobby import MAX_PER_TURN, Lobby, through_lobby
from serve_app.http.proxy import UVICORNS_STARTUP, protocol_of
from serve_app.http.turnstile import Turnstile, TurnstileSettings
from serve_app.http.written_refusals import WrittenRefusals
from tests.http.full_proxy import BODY, COUNTED, HEALTH, Busy, Echo, Line, post, statuses

NUM_CLIENTS = 8 * MAX_PER_TURN
LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


class House:
    """A server on a port, and the lobby before it."""

    def __init__(self, turnstile: Turnstile, app: Echo, *, keep_alive_s: int = 60) -> None:
        self.app = app
        self.turnstile = turnstile
        config = uvicorn.Config(app, lifespan="off", log_config=None, backlog=2048, timeout_keep_alive=keep_alive_s)
        config.timeout_graceful_shutdown = 1
        config.load()
        config.http_protocol_class = protocol_of(turnstile)  # type: ignore[assignment]
        self.server = uvicorn.Server(config)
        self.server.lifespan = config.lifespan_class(config)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.address = self.listener.getsockname()

    @property
    def lobby(self) -> Lobby:
        (found,) = self.server.servers
        assert isinstance(found, Lobby)
        return found

    @property
    def num_handed_over(self) -> int:
        return len(self.server.server_state.connections)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[House]:
        startup = through_lobby(UVICORNS_STARTUP, self.turnstile, WrittenRefusals(self.turnstile.refusal))
        await startup(self.server, [self.listener])
        try:
            yield self
        finally:
            await self.server.shutdown([self.listener])

    @contextmanager
    def client(self) -> Iterator[socket.socket]:
        with socket.create_connection(self.address) as client:
            client.setblocking(False)
            yield client

    async def ask(self, client: socket.socket, data: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, data)
        return await answer(client)


async def answer(client: socket.socket) -> bytes:
    """One response; empty where the connection has ended."""
    received = b""
    async with asyncio.timeout(10):
        while not is_whole(received):
            more = await asyncio.get_running_loop().sock_recv(client, 65536)
            if not more:
                return b""
            received += more
    return received


def is_whole(received: bytes) -> bool:
    head, found, rest = received.partition(b"\r\n\r\n")
    return bool(found) and len(rest) >= int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    def run(what: Any) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(what)

    return run


Run = Callable[[Awaitable[None]], None]


def test_clients_who_come_at_once_are_accepted_many_per_turn() -> None:
    async def come() -> None:
        async with House(Turnstile(), Echo()).open() as house:
            clients = [socket.create_connection(house.address) for _ in range(NUM_CLIENTS)]
            num_turns = 0
            while len(house.lobby) < NUM_CLIENTS:
                await asyncio.sleep(0)
                num_turns += 1
            assert num_turns <= 2 * NUM_CLIENTS // MAX_PER_TURN
            for client in clients:
                client.close()
            await until(lambda: not len(house.lobby))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(come())


def test_the_server_itself_accepts_one_per_turn() -> None:
    """What is mended; where this fails, the mend is no longer needed."""

    async def come() -> None:
        house = House(Turnstile(), Echo())
        await UVICORNS_STARTUP(house.server, [house.listener])
        clients = [socket.create_connection(house.address) for _ in range(NUM_CLIENTS)]
        num_turns = 0
        while house.num_handed_over < NUM_CLIENTS:
            await asyncio.sleep(0)
            num_turns += 1
        for client in clients:
            client.close()
        await house.server.shutdown([house.listener])
        assert num_turns >= NUM_CLIENTS

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(come())


@pytest.mark.parametrize("size", [1, 7, 40, len(post())])
def test_a_request_is_answered_in_whatever_pieces_it_comes(run: Run, size: int) -> None:
    async def ask() -> None:
        async with House(Turnstile(), Echo()).open() as house:
            with house.client() as client:
                for at in range(0, len(post()), size):
                    await asyncio.get_running_loop().sock_sendall(client, post()[at : at + size])
                    await asyncio.sleep(0.001)
                assert (await answer(client)).endswith(BODY)
                assert (await house.ask(client, HEALTH)).startswith(b"HTTP/1.1 200")

    run(ask())


def test_a_large_body_arrives_whole_and_in_its_order(run: Run) -> None:
    body = bytes(range(256)) * 8192

    async def ask() -> None:
        async with House(Turnstile(), Echo()).open() as house:
            with house.client() as client:
                assert (await house.ask(client, post(b"Content-Length: %d\r\n\r\n" % len(body) + body))).endswith(body)

    run(ask())


def test_who_is_one_too_many_is_told_as_by_the_server_and_not_handed_over(run: Run) -> None:
    async def ask() -> None:
        line = Line(Busy(pause_s=0.0), Echo())
        expected = await line.send_all(post())
        async with House(Busy(pause_s=0.0), Echo()).open() as house:
            with house.client() as client:
                received = await house.ask(client, post())
                assert without_own(received) == without_own(expected)
                assert (await house.ask(client, post())).startswith(b"HTTP/1.1 503")
                assert house.num_handed_over == 0
                assert house.server.server_state.total_requests == house.turnstile.num_refused == 2
                assert (await house.ask(client, HEALTH)).startswith(b"HTTP/1.1 200")
                assert house.num_handed_over == 1
                assert (await house.ask(client, post())).startswith(b"HTTP/1.1 503")
                assert house.app.num_asked == 1

    run(ask())


def without_own(response: bytes) -> list[bytes]:
    """But for the server's name and the date, which a server that was only asked to start has not told yet."""
    return [line for line in response.split(b"\r\n") if not line.startswith((b"date:", b"server:"))]


def test_a_refused_connection_ends_where_its_client_says_so(run: Run) -> None:
    async def ask() -> None:
        async with House(Busy(), Echo()).open() as house:
            with house.client() as client:
                received = await house.ask(client, post(b"Connection: close\r\n" + COUNTED))
                assert statuses(received) == [503]
                assert b"\r\nconnection: close\r\n" in received
                assert await answer(client) == b""

    run(ask())


def test_who_comes_when_told_finds_a_place(run: Run) -> None:
    async def ask() -> None:
        busy = Busy(max_requests=4)
        async with House(busy, Echo()).open() as house:
            with house.client() as client:
                refused = await house.ask(client, post())
                await asyncio.sleep(float(refused.partition(b"retry-after: ")[2].partition(b"\r\n")[0]) + 0.1)
                busy.make_room()
                assert (await house.ask(client, post())).endswith(BODY)

    run(ask())


def test_who_asks_in_a_loop_is_not_read_for_a_while(run: Run) -> None:
    async def ask() -> None:
        async with House(Busy(pause_s=0.4), Echo()).open() as house:
            with house.client() as client:
                began_at = time.monotonic()
                for _ in range(4):
                    assert (await house.ask(client, post())).startswith(b"HTTP/1.1 503")
                assert time.monotonic() - began_at >= 0.2

    run(ask())


def test_what_was_sent_before_its_client_left_is_not_computed(run: Run) -> None:
    async def ask() -> None:
        busy = Busy(pause_s=0.2)
        async with House(busy, Echo()).open() as house:
            with house.client() as client:
                for _ in range(3):
                    await house.ask(client, post())
                await asyncio.get_running_loop().sock_sendall(client, post())
            busy.make_room()
            assert len(house.lobby) == 1
            await until(lambda: not len(house.lobby))
            assert house.app.num_asked == 0

    run(ask())


def test_who_has_a_place_keeps_it_while_others_are_refused(run: Run) -> None:
    """As many as there are places are let in of those who come at once, and not one more."""
    num_places = 16

    async def ask() -> None:
        app = Echo()
        app.may_answer.clear()
        turnstile = Turnstile(TurnstileSettings(max_requests=num_places))
        async with House(turnstile, app).open() as house:
            clients = [socket.create_connection(house.address) for _ in range(64)]
            for client in clients:
                client.send(post())
                client.setblocking(False)
            await until(lambda: house.turnstile.num_refused == 64 - num_places)
            await until(lambda: app.num_asked == num_places)
            assert house.turnstile.num_inside == house.num_handed_over == num_places
            app.may_answer.set()
            answers = await asyncio.gather(*(answer(client) for client in clients))
            assert [statuses(each)[0] for each in answers].count(200) == num_places
            for client in clients:
                client.close()
            await until(lambda: not len(house.lobby) and not house.num_handed_over)
            assert not house.turnstile.is_full()

    run(ask())


def test_a_health_check_does_not_wait_behind_those_who_have_a_place(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobby, "MAX_BROUGHT", 0)

    async def ask() -> None:
        async with House(Turnstile(), Echo()).open() as house:
            with house.client() as client, house.client() as doctor:
                await asyncio.get_running_loop().sock_sendall(client, post())
                assert (await house.ask(doctor, HEALTH)).startswith(b"HTTP/1.1 200")
                assert house.app.num_asked == 1

    run(ask())


@pytest.mark.parametrize(("max_wait_s", "is_answered"), [(0.05, True), (60.0, False)])
def test_who_has_a_place_waits_for_those_who_have_none_and_not_for_long(
    run: Run, monkeypatch: pytest.MonkeyPatch, max_wait_s: float, is_answered: bool
) -> None:
    monkeypatch.setattr(lobby, "MAX_WAIT_S", max_wait_s)
    monkeypatch.setattr(Lobby, "_is_quiet", property(lambda lobby: False, lambda lobby, is_quiet: None), raising=False)

    async def ask() -> None:
        async with House(Turnstile(), Echo()).open() as house:
            with house.client() as client:
                asking = asyncio.create_task(house.ask(client, post()))
                done, _ = await asyncio.wait([asking], timeout=10 if is_answered else 0.3)
                assert (asking in done) == is_answered
                asking.cancel()

    run(ask())


def test_who_says_nothing_is_let_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobby, "HEADERS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(lobby, "SWEEP_S", 0.05)

    async def come() -> None:
        async with House(Busy(), Echo()).open() as house:
            with house.client() as client:
                assert await answer(client) == b""
            assert len(house.lobby) == 0

    run(come())


def test_headers_have_no_more_time_for_having_begun_in_the_lobby(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobby, "HEADERS_TIMEOUT_S", 0.3)

    async def come() -> None:
        async with House(Busy(), Echo()).open() as house:
            with house.client() as client:
                await asyncio.sleep(0.2)
                began_at = time.monotonic()
                assert (await house.ask(client, post()[:20])).startswith(b"HTTP/1.1 408")
                assert time.monotonic() - began_at < header_limits.HEADERS_TIMEOUT_S / 2

    run(come())


def test_a_refused_client_that_does_not_come_again_is_let_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobby, "SWEEP_S", 0.05)

    async def come() -> None:
        async with House(Busy(pause_s=0.0), Echo(), keep_alive_s=1).open() as house:
            with house.client() as client:
                await house.ask(client, post())
                assert await answer(client) == b""

    run(come())


def test_what_is_not_to_be_read_is_not_read_on(run: Run) -> None:
    """A transport begins to read behind its beginning, whatever it was told meanwhile."""

    async def ask() -> None:
        busy = Busy(pause_s=0.4)
        busy.reads_on = lambda: False  # type: ignore[method-assign]
        async with House(busy, Echo()).open() as house:
            with house.client() as client:
                special = post(path=b"/v1/completions/")
                assert (await house.ask(client, special)).startswith(b"HTTP/1.1 503")
                assert house.num_handed_over == 1
                began_at = time.monotonic()
                assert (await house.ask(client, special)).startswith(b"HTTP/1.1 503")
                assert time.monotonic() - began_at >= 0.15

    run(ask())


def test_all_of_it_is_closed_with_the_server(run: Run) -> None:
    async def come() -> None:
        house = House(Busy(max_requests=1), Echo())
        async with house.open():
            clients = [socket.create_connection(house.address) for _ in range(3)]
            for client in clients[1:]:
                client.send(post())
            await until(lambda: len(house.lobby) == 3 and house.turnstile.num_refused == 2)
        for client in clients:
            client.settimeout(10)
            while client.recv(65536):
                pass
            client.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(house.address)

    run(come())


def test_who_is_on_the_way_to_a_server_that_ends_is_let_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobby, "MAX_BROUGHT", 0)

    async def come() -> None:
        house = House(Turnstile(), Echo())
        async with house.open():
            client = socket.create_connection(house.address)
            client.send(post())
            await until(lambda: len(house.lobby) == 1)
        client.settimeout(10)
        assert client.recv(1) == b""
        client.close()
        assert not house.turnstile.is_full()

    run(come())


def test_without_a_descriptor_left_it_accepts_again_later(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lobby, "ACCEPT_AGAIN_S", 0.1)

    class Exhausted:
        """A listener that cannot accept a first time."""

        def __init__(self, listener: socket.socket) -> None:
            self._listener = listener
            self.num_failed = 0

        def accept(self) -> Any:
            self.num_failed += 1
            if self.num_failed == 1:
                raise OSError(errno.EMFILE, "too many open files")
            return self._listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._listener, name)

    async def come() -> None:
        house = House(Turnstile(), Echo())
        house.listener = Exhausted(house.listener)  # type: ignore[assignment]
        async with house.open():
            with house.client() as client:
                assert (await house.ask(client, HEALTH)).startswith(b"HTTP/1.1 200")

    with caplog.at_level(logging.WARNING):
        run(come())
    assert "too many open files" in caplog.text


def test_what_nobody_has_thought_of_ends_one_connection(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(data: bytes) -> None:
        raise ZeroDivisionError

    async def come() -> None:
        async with House(Turnstile(), Echo()).open() as house:
            with house.client() as client, house.client() as other:
                await until(lambda: len(house.lobby) == 2)
                with monkeypatch.context() as patch:
                    patch.setattr(lobby, "plain_post", fail)
                    assert await house.ask(client, post()) == b""
                assert (await house.ask(other, post())).endswith(BODY)

    with caplog.at_level(logging.ERROR):
        run(come())
    assert "ZeroDivisionError" in caplog.text


def test_small_pieces_are_sent_at_once(run: Run) -> None:
    async def come() -> None:
        async with House(Turnstile(), Echo()).open() as house:
            with house.client() as client:
                await house.ask(client, HEALTH)
                (protocol,) = house.server.server_state.connections
                connection = protocol.transport.get_extra_info("socket")  # type: ignore[union-attr]
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(come())


def test_what_is_encrypted_is_left_to_the_server() -> None:
    async def come() -> None:
        house = House(Turnstile(), Echo())
        house.server.config.ssl = object()  # type: ignore[assignment]
        told = []

        async def startup(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
            told.append(sockets)

        await through_lobby(startup, house.turnstile, WrittenRefusals(house.turnstile.refusal))(
            house.server, [house.listener]
        )
        assert told == [[house.listener]]
        house.listener.close()

    asyncio.run(come())
