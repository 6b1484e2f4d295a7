"""Serves one model without Ray, for tools that talk to a port: `python -m tests.flow.served --port 8017`.

`--fake` puts a backend that recites in the place of the engine; `--dialect` is that of requests which name none.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack

import uvicorn
from starlette.types import ASGIApp

from serve_app.api.dialects import DIALECTS, UNION
from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router, RouterConfig
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card
from tests.flow.stack import running_stack

LEASE_S = 86_400
"""A tool may take long, and nobody renews it."""


def reciting(config: RouterConfig) -> ASGIApp:
    """The application over a backend in memory, which serves `demo` and `demo:pirate`."""
    fleet = Fleet("router-0")
    card = replica_card("replica-0", model_card("demo", adapter_card("pirate")))
    fleet.put(card, FakeBackend(card))
    return build_app(Router(fleet, config))


async def serve(arguments: argparse.Namespace) -> None:
    config = RouterConfig(dialect=DIALECTS[arguments.dialect])
    async with AsyncExitStack() as stack:
        if arguments.fake:
            app = reciting(config)
        else:
            running = running_stack(num_replicas=1, config=config, threads=1, max_num_sequences=8, lease_s=LEASE_S)
            app = (await stack.enter_async_context(running)).app
        settings = uvicorn.Config(app, port=arguments.port, lifespan="off", log_level="warning")
        await uvicorn.Server(settings).serve()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dialect", choices=list(DIALECTS), default=UNION.name)
    parser.add_argument("--fake", action="store_true")
    asyncio.run(serve(parser.parse_args()))
