"""A new router takes requests once it knows keys and models, or soon in any case."""

from __future__ import annotations

import asyncio

from serve_app.deployments.router import informed
from tests.fakes import settle


async def test_it_waits_for_all_that_it_has_to_hear() -> None:
    events = [asyncio.Event(), asyncio.Event()]
    waiting = asyncio.create_task(informed(events, within_s=3600.0))
    for each in events:
        await settle()
        assert not waiting.done()
        each.set()
    await waiting


async def test_it_does_not_wait_for_what_never_comes() -> None:
    await informed([asyncio.Event()], within_s=0.0)
    await informed([])
