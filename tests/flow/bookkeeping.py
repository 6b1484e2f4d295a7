"""Routers that keep accounting, over replicas and accounts in the process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from serve_app.core.ledger import Counted, Price, Prices, Row
from serve_app.core.tenants import Identity, Lease, Limits, Statement, Tenant
from serve_app.http.app import build_app
from serve_app.http.guard import Door
from serve_app.router.accounting import Accounting
from serve_app.router.admission import Admission
from serve_app.router.fleet import Fleet
from serve_app.router.idempotency import Replays, ReplaySettings
from serve_app.router.ledger_writer import LedgerWriter
from serve_app.router.quotas import Quotas
from serve_app.router.router import Router, RouterConfig
from serve_app.router.run import RunSettings
from serve_app.tenants.ledger import LedgerStore
from serve_app.tenants.lending import Lending
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card

LIMITS = Limits(requests_per_minute=100, tokens_per_minute=100_000, max_in_flight=8)
TENANTS = {name: Tenant(name=name, limits=LIMITS if name == "acme" else Limits()) for name in ("acme", "beta")}


@dataclass(slots=True)
class FakeAccounts:
    """Accounts in the process. drops: calls get lost, before or after the rows were kept

    has_lost: a call, before
    """

    store: LedgerStore
    lending: Lending
    drops: random.Random | None = None
    has_lost: bool = False
    num_recorded: int = 0
    prices: Prices | None = None

    async def renew(self, router_id: str, statements: Sequence[Statement]) -> Sequence[Lease]:
        return [self.lending.renew(router_id, each) for each in statements]

    async def record(self, rows: Sequence[Row], counted: Sequence[Counted]) -> None:
        luck = 1.0 if self.drops is None else self.drops.random()
        if luck < 0.2:
            self.has_lost = True
            raise ConnectionError("the call was lost")
        self.num_recorded += self.store.record(rows, counted, 0.0, prices=self.prices)
        if luck < 0.4:
            raise ConnectionError("the answer was lost")


@dataclass(slots=True)
class House:
    """One router, its clients and its accounting."""

    fleet: Fleet
    accounting: Accounting
    client: httpx.AsyncClient
    admission: Admission
    tasks: list[asyncio.Task[object]] = field(default_factory=list)

    def ask(self, tenant: str, **body: object) -> None:
        asked = {"model": "tiny", "prompt": "a b c", "max_tokens": 12, **body}
        post = self.client.post("/v1/completions", json=asked, headers={"x-api-key": tenant})
        self.tasks.append(asyncio.create_task(post))

    async def kill(self) -> None:
        """As by kill -9: what was not brought is lost."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.fleet.close()
        await self.client.aclose()


def house(accounts: FakeAccounts, backends: Sequence[FakeBackend], name: str = "router-0") -> House:
    fleet = Fleet(name)
    for backend in backends:
        fleet.put(backend.card, backend)
    accounting = Accounting(Quotas(name, accounts), LedgerWriter(accounts, fleet.counts), wall=lambda: 0.0)
    accounting.prices = accounts.prices = Prices(by_model={"tiny": Price(prompt=1.0, completion=2.0)})
    door = Door(identify=lambda key: Identity(tenant=TENANTS[key or ""], key_id=f"key of {key}"))
    router = Router(fleet, RouterConfig(run=RunSettings(max_pause_s=0.0)), accounting=accounting)
    app = build_app(router, door=door, replays=Replays(ReplaySettings(seconds=60)))
    transport = httpx.ASGITransport(app=app)
    return House(fleet, accounting, httpx.AsyncClient(transport=transport, base_url="http://flow"), router.admission)


def backend(number: int, *, is_stepped: bool = False) -> FakeBackend:
    return FakeBackend(replica_card(f"r{number}", model_card("tiny", adapter_card("pirate"))), is_stepped=is_stepped)


async def flushed(house: House, *, is_sure: bool) -> None:
    while True:
        try:
            await house.accounting.ledger_writer.flush()
            return
        except ConnectionError:
            if not is_sure:
                return
