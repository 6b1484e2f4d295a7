"""Clients that come at once are accepted in few turns of the event loop."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette

from serve_app.http.accepting import NUM_LISTENERS, Startup, accepting_many

NUM_CLIENTS = 8 * NUM_LISTENERS


@pytest.fixture
def listener() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


async def turns_to_accept(server: uvicorn.Server, startup: Startup, listener: socket.socket) -> int:
    """Turns of the loop until all clients are accepted, who were all there before the first of them."""
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await startup(server, [listener])
    try:
        with ExitStack() as clients:
            for _ in range(NUM_CLIENTS):
                clients.enter_context(socket.create_connection(listener.getsockname()))
            num_turns = 0
            while len(server.server_state.connections) < NUM_CLIENTS:
                await asyncio.sleep(0)
                num_turns += 1
            return num_turns
    finally:
        await server.shutdown([listener])


def run(startup: Startup, listener: socket.socket) -> int:
    config = uvicorn.Config(Starlette(), lifespan="off", log_config=None)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(turns_to_accept(uvicorn.Server(config), startup, listener))


def test_clients_who_come_at_once_are_accepted_many_per_turn(listener: socket.socket) -> None:
    assert run(accepting_many(uvicorn.Server.startup), listener) <= 2 * NUM_CLIENTS // NUM_LISTENERS


def test_the_server_itself_accepts_one_per_turn(listener: socket.socket) -> None:
    """What is mended; where this fails, the mend is no longer needed."""
    assert run(uvicorn.Server.startup, listener) >= NUM_CLIENTS


def test_every_descriptor_is_closed_with_the_server(listener: socket.socket) -> None:
    address = listener.getsockname()
    run(accepting_many(uvicorn.Server.startup), listener)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
