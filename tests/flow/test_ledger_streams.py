"""What a row says of a stream that did not end well: its status was sent before anybody knew."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from sqlalchemy import text

from serve_app.core.errors import EngineFailed
from tests.fakes import settle
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
        await settle(100)
    for _ in range(2):  # what fails once goes on
        while not stepped.num_live:  # noqa: ASYNC110
            await asyncio.sleep(0)
        stepped.fail(EngineFailed("the engine failed"))
    [answer] = await asyncio.gather(*slow.tasks)
    assert isinstance(answer, httpx.Response)
    assert (answer.status_code, b'"error"' in answer.content) == (200, True)
    await slow.accounting.ledger_writer.flush()
    assert await statuses(accounts) == [(500, 2)]
    await slow.kill()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_revoked_key_ends_its_requests_and_no_others_and_the_ledger_has_them(
    accounts: FakeAccounts,  # noqa: F811
    stream: bool,
) -> None:
    stepped = backend(0, is_stepped=True)
    slow = house(accounts, [stepped])
    for tenant in ("acme", "beta"):
        slow.ask(tenant, stream=stream)
    while stepped.num_live < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(3):
        stepped.step()
        await settle(100)
    for _ in range(2):  # routers look again and again
        slow.admission.end_keys(lambda key_id: key_id != "key of acme")
    revoked = await asyncio.wait_for(slow.tasks[0], 60)
    assert isinstance(revoked, httpx.Response)
    assert revoked.status_code == (200 if stream else 401)
    assert revoked.content.count(b'"invalid_api_key"') == 1
    assert revoked.content.endswith(b"data: [DONE]\n\n") == stream
    await settle(100)
    assert stepped.num_live == 1, "nothing more is computed for it"
    while stepped.num_live:
        stepped.step()
        await asyncio.sleep(0)
    other = await slow.tasks[1]
    assert isinstance(other, httpx.Response)
    assert (other.status_code, b"error" in other.content) == (200, False)
    await slow.accounting.ledger_writer.flush()
    assert await statuses(accounts) == [(401, 3), (200, 12)]
    await slow.kill()


async def test_a_stream_that_ends_well_is_a_200(accounts: FakeAccounts) -> None:  # noqa: F811
    quick = house(accounts, [backend(0)])
    quick.ask("acme", stream=True)
    await asyncio.gather(*quick.tasks)
    await quick.accounting.ledger_writer.flush()
    assert await statuses(accounts) == [(200, 12)]
    await quick.kill()
