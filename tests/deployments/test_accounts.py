"""Accounts as routers call them, without Ray: whatever the database does, one writer, and nobody waits for another."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from serve_app.core.errors import Unavailable
from serve_app.core.ledger import Counted, Price, Prices, Row, Spent
from serve_app.core.tenants import Meter, Statement
from serve_app.deployments.accounts import Accounts
from serve_app.deployments.logs import ACCESS_LOGGER
from serve_app.router.idempotency import Claim, Standing
from serve_app.tenants.errors import StoreUnavailable, TenancyError
from serve_app.tenants.leased_limits import NEVER_TOLD

HELD_S = 30
LOOKS = 3


@pytest.fixture
def accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accounts]:
    """With a tenant that has a budget and one that has none."""
    loggers = [logging.getLogger(name) for name in ("serve_app", ACCESS_LOGGER)]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]
    monkeypatch.setattr("serve_app.deployments.accounts.LEARNS_S", 0.0)
    made = Accounts(f"sqlite:///{tmp_path / 'kept.db'}", str(tmp_path / "pepper"), 30)
    yield made
    made._store.close()
    for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


@dataclass(slots=True)
class Slow:
    """What reads the sums of the ledger stands still until it is let go. num_reads: that came"""

    num_reads: int = 0
    is_free: threading.Event = field(default_factory=threading.Event)

    def before(self, connection: object, cursor: object, statement: str, *rest: object) -> None:
        if "sum(days.cost)" in statement:
            self.num_reads += 1
            self.is_free.wait(HELD_S)


@pytest.fixture
def slow(accounts: Accounts) -> Iterator[Slow]:
    made = Slow()
    event.listen(accounts._store.engine, "before_cursor_execute", made.before)
    yield made
    made.is_free.set()


def wanted(tenant: str, *meters: Meter) -> Statement:
    return Statement(tenant=tenant, used={}, wanted=dict.fromkeys(meters, 5))


async def with_tenants(accounts: Accounts) -> None:
    by = {"name": "rich", "limits": {"budget_per_day": 1.0}}, {"name": "plain", "limits": {"max_in_flight": 9}}
    for each in by:
        await accounts.administer("add_tenant", each, "test")
    assert await accounts.directory(0, "r0") is not None


async def test_while_the_ledger_is_slow_claims_looks_and_other_tenants_go_on(accounts: Accounts, slow: Slow) -> None:
    await with_tenants(accounts)
    claim = Claim(tenant="plain", key="k", fingerprint=b"f", attempt="1", seconds=60)
    statements = [wanted("rich", Meter.DAY), wanted("plain", Meter.IN_FLIGHT)]
    renewal = asyncio.create_task(accounts.renew("r0", statements))
    beside = asyncio.create_task(accounts.renew("r1", statements))
    await asyncio.sleep(0)
    assert await accounts.claim(claim, "r0") is Standing.YOURS
    for _ in range(LOOKS):
        assert await accounts.directory(0, "r0") is not None
    for leases in (await renewal, await beside):
        assert leases[0] == NEVER_TOLD, "nobody knows what is left of its budget"
        assert leases[1].granted[Meter.IN_FLIGHT] >= 4, "five for one, and what is left for the other"
    assert (slow.num_reads, slow.is_free.is_set()) == (1, False), "it is asked once, whoever waits"
    slow.is_free.set()
    while (leases := await accounts.renew("r0", statements))[0] == NEVER_TOLD:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert leases[0].granted == {Meter.DAY: 5}
    assert slow.num_reads == 1


async def test_what_is_read_beside_is_what_the_ledger_says(accounts: Accounts) -> None:
    await with_tenants(accounts)
    spent = Row(id="a", tenant="rich", key_id="k", request_id="r", model="tiny", at=0.0, cost=400_000_000)
    today = Row(id="b", tenant="rich", key_id="k", request_id="r", model="tiny", at=time.time(), cost=700_000_000)
    await accounts.record([spent, today], ())
    [lease] = await accounts.renew("r0", [Statement(tenant="rich", used={}, wanted={Meter.DAY: 10**9})])
    assert lease.granted == {Meter.DAY: 300_000_000}


async def test_what_no_row_explains_is_charged_by_the_prices_that_a_router_tells(accounts: Accounts) -> None:
    await with_tenants(accounts)
    counted = Counted(replica_id="r0", model="tiny", spent=Spent(flow="rich", prompt_tokens=300))
    await accounts.record((), [counted], Prices(by_model={"tiny": Price(prompt=1000.0)}))
    [lease] = await accounts.renew("r0", [Statement(tenant="rich", used={}, wanted={Meter.DAY: 10**9})])
    assert lease.granted == {Meter.DAY: 700_000_000}


async def test_a_router_that_gives_up_its_call_lets_no_second_writer_in(accounts: Accounts) -> None:
    await with_tenants(accounts)
    writing, is_free, writers = threading.Event(), threading.Event(), list[int]()

    def wait(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if "INTO ledger" in statement:
            writers.append(threading.get_ident())
            writing.set()
            is_free.wait(HELD_S)

    event.listen(accounts._store.engine, "before_cursor_execute", wait)
    rows = [Row(id=each, tenant="plain", key_id="k", request_id="r", model="tiny", at=0.0) for each in "ab"]
    given_up = asyncio.create_task(accounts.record(rows[:1], ()))
    await asyncio.to_thread(writing.wait, HELD_S)
    given_up.cancel()
    await asyncio.wait([given_up])
    assert accounts._writing.locked()
    following = asyncio.create_task(accounts.record(rows[1:], ()))
    is_free.set()
    await following
    assert len(writers) == 2


async def test_a_ledger_that_fails_is_asked_again(accounts: Accounts) -> None:
    await with_tenants(accounts)
    failures = [True]

    def fail(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if "sum(days.cost)" in statement and failures:
            failures.pop()
            raise OSError("the disk is gone")

    event.listen(accounts._store.engine, "before_cursor_execute", fail)
    statement = wanted("rich", Meter.DAY)
    assert await accounts.renew("r0", [statement]) == [NEVER_TOLD]
    assert (await accounts.renew("r0", [statement]))[0].granted == {Meter.DAY: 5}


async def test_a_store_that_is_locked_is_told_with_when_to_come_again_and_without_what_was_sent(
    accounts: Accounts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_tenants(accounts)
    logging.getLogger("serve_app").propagate = True
    monkeypatch.setattr("serve_app.tenants.store.BUSY_TIMEOUT_MS", 20)
    accounts._store.engine.dispose()  # connections from here on wait no longer than that
    with sqlite3.connect(str(accounts._store.engine.url.database), isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        refused = await accounts.administer("add_tenant", {"name": "new"}, "key-boss")
        assert isinstance(refused, Unavailable)
        assert refused.facts == {"retry_after_s": 2}
        assert str(refused) == "The store of tenants did not do what was asked: database is locked."
        row = Row(id="secret-id", tenant="plain", key_id="k", request_id="r", model="tiny", at=0.0)
        with pytest.raises(OperationalError) as error:
            await accounts.record([row], ())
        assert "secret-id" not in str(error.value), "whoever writes it down"
        other.execute("ROLLBACK")
    other.close()
    assert not isinstance(await accounts.administer("add_tenant", {"name": "new"}, "key-boss"), Exception)
    assert "add_tenant of key-boss was not done" in caplog.text


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_store_that_was_moved_away_is_missed_until_it_is_back_and_no_other_begins(
    accounts: Accounts, tmp_path: Path, is_replaced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = await accounts.directory(0, "router-0")
    place, away = tmp_path / "kept.db", tmp_path / "away.db"
    place.rename(away)
    if is_replaced:
        place.write_bytes(away.read_bytes())
    with pytest.raises(StoreUnavailable, match=r"kept.db, the store of tenants, was moved, removed or replaced"):
        await accounts.directory(0, "router-0")
    refused = await accounts.administer("create_admin_key", {"lifetime_s": None}, "test")
    assert isinstance(refused, Unavailable)
    assert "Put it back" in str(refused)
    logging.getLogger("serve_app").propagate = True
    await accounts.check_health()  # another replica would not find it either
    assert "was moved, removed or replaced" in caplog.text
    if not is_replaced:
        assert not place.exists(), "looking for it made none"
        with pytest.raises(TenancyError, match="There is no store of tenants at"):
            Accounts(f"sqlite:///{place}", str(tmp_path / "pepper"), 30)
        assert not place.exists(), "its pepper is there: it was moved, and another would know no key"
    away.replace(place)
    after = await accounts.directory(0, "router-0")
    assert before is not None
    assert after is not None
    assert (after.version, after.tenants.keys()) == (before.version, before.tenants.keys())


async def test_what_a_driver_says_of_its_database_is_logged_and_not_told(
    accounts: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("serve_app").propagate = True
    said = 'connection to server at "10.1.2.3", port 5432 failed: no password for user "books" in /srv/keys'

    def fail(*arguments: object) -> None:
        raise OperationalError("SELECT", {}, Exception(said))

    event.listen(accounts._store.engine, "before_cursor_execute", fail)
    refused = await accounts.administer("list_tenants", {}, "key-boss")
    assert isinstance(refused, Unavailable)
    assert str(refused) == "The store of tenants did not do what was asked; retry."
    assert said in caplog.text
