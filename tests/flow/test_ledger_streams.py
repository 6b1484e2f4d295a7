"""What a row says of a stream that did not end well: its status was sent before anybody knew."""

from __future__ import annotations

import asyncio

import httpx
from sqlalchemy import text

from tests.flow.test_ledger import FakeAccounts, accounts, backend, house  # noqa: F401


async def statuses(accounts: FakeAccounts) -> list[tuple[int, int]]:  # noqa: F811
    """And completion tokens, of each row."""
    with accounts.store.engine.connect() as connection:
        rows = connection.execute(text("SELECT status, completion_tokens FROM ledger ORDER BY completion_tokens"))
        return [(row.status, row.completion_tokens) for row in rows]


async def test_a_stream_that_ends_by_an_error_is_written_down_as_that(accounts: FakeAccounts) -> None:  # noqa: F811
    stepped = backend(0, is_stepped=True)
    slow = house(accounts, [stepped])
    slow.ask("acme", stream=True)
    while not stepped.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(2):
        stepped.step()
        await asyncio.sleep(0.01)
    stepped.die()
    [answer] = await asyncio.gather(*slow.tasks)
    assert isinstance(answer, httpx.Response)
    assert (answer.status_code, b'"error"' in answer.content) == (200, True)
    await slow.books.scribe.flush()
    assert await statuses(accounts) == [(500, 2)]
    await slow.kill()


async def test_a_stream_that_ends_well_is_a_200(accounts: FakeAccounts) -> None:  # noqa: F811
    quick = house(accounts, [backend(0)])
    quick.ask("acme", stream=True)
    await asyncio.gather(*quick.tasks)
    await quick.books.scribe.flush()
    assert await statuses(accounts) == [(200, 12)]
    await quick.kill()
