"""Routers that compute batches over a real store, replicas in the process, and a clock that the test holds."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import openai

from serve_app.core.errors import InvalidRequest, NotFound, Unavailable
from serve_app.core.ledger import Price, Prices
from serve_app.http.app import build_app
from serve_app.http.batch_lines import line_answers
from serve_app.http.file_routes import Batches
from serve_app.http.guard import Door
from serve_app.http.settings import HttpSettings
from serve_app.router.accounting import Accounting
from serve_app.router.batch_files import BatchFiles
from serve_app.router.batch_worker import BatchWorker
from serve_app.router.fleet import Fleet
from serve_app.router.idempotency import Replays
from serve_app.router.ledger_writer import LedgerWriter
from serve_app.router.quotas import Quotas
from serve_app.router.router import Router, RouterConfig
from serve_app.router.run import RunSettings
from serve_app.tenants.admin_service import AdminService
from serve_app.tenants.batch_work import BatchWork
from serve_app.tenants.errors import NotThere, TenancyError
from serve_app.tenants.lending import Lending
from serve_app.tenants.opening import open_store
from serve_app.tenants.store import Author
from tests.fakes import FakeBackend, model_card, replica_card, settle
from tests.flow.bookkeeping import FakeAccounts

PRICES = Prices(by_model={"tiny": Price(prompt=1.0, completion=2.0)})
ENDED = ("completed", "failed", "expired", "cancelled")


class BatchHouse:
    """A store, a folder of files, and what routers ask. now: of every clock, seconds"""

    def __init__(self, folder: Path, url: str, *, luck: random.Random | None = None) -> None:
        self.now, self.luck = 1000.0, luck
        self.folder = folder / "files"
        self.store, self.pepper = open_store(url, pepper_file=folder / "none", environment="p" * 32)
        self.admin_service = AdminService(self.store, self.pepper)
        lending = Lending(lambda name: self.store.tenant(name).limits, clock=self.clock, wall=self.clock)
        self.accounts = FakeAccounts(self.admin_service.ledger, lending)
        self.keys: dict[str, str] = {}
        for name in ("acme", "beta"):
            self.admin_service.answer("add_tenant", {"name": name}, self.by())
            made = self.admin_service.answer("create_key", {"tenant": name}, self.by())
            self.keys[name] = str(made["key"])
        self.restart()

    def clock(self) -> float:
        return self.now

    def by(self, actor: str = "test") -> Author:
        return Author(name=actor, at=self.now)

    def restart(self) -> None:
        """As when Accounts die: what they knew in memory is lost."""
        self.work = BatchWork(self.admin_service.ledger, clock=self.clock, wall=self.clock)

    async def ask(self, method: str, *arguments: object) -> object:
        """Call what Accounts would, and lose some calls before they are made, or their answers."""
        luck = 1.0 if self.luck is None else self.luck.random()
        if luck < 0.1:
            raise Unavailable("the call was lost")
        owner = self.admin_service.batches if method == "add_file" else self.work
        try:
            answer = getattr(owner, method)(*arguments)
        except NotThere as error:
            raise NotFound(str(error)) from error
        except TenancyError as error:
            raise InvalidRequest(str(error)) from error
        if luck < 0.2:
            raise Unavailable("the answer was lost")
        return answer

    async def administer(self, service: str, arguments: Mapping[str, object], actor: str) -> Mapping[str, object]:
        try:
            return self.admin_service.answer(service, arguments, self.by(actor))
        except NotThere as error:
            raise NotFound(str(error)) from error
        except TenancyError as error:
            raise InvalidRequest(str(error)) from error

    def limit(self, tenant: str, **limits: int) -> None:
        self.admin_service.answer("set_tenant", {"name": tenant, "limits": limits}, self.by())


class Node:
    """One router of a house, with its worker and its clients."""

    def __init__(self, house: BatchHouse, backends: Sequence[FakeBackend], name: str = "router-0") -> None:
        self.house, self.backends = house, backends
        self.fleet = Fleet(name)
        for each in backends:
            self.fleet.put(each.card, each)
        quotas = Quotas(name, house.accounts, clock=house.clock)
        writer = LedgerWriter(house.accounts, self.fleet.counts)
        self.accounting = Accounting(quotas, writer, wall=house.clock)
        self.accounting.prices = house.accounts.prices = PRICES
        self.router = Router(self.fleet, RouterConfig(run=RunSettings(max_pause_s=0.0)), accounting=self.accounting)
        settings = HttpSettings(max_file_bytes=1 << 20, max_files_bytes=1 << 21)
        files = BatchFiles(house.folder, clock=house.clock)
        tenants = {each.name: each for each in house.store.tenants()}
        self.worker = BatchWorker(house.ask, self.router, files, line_answers(settings), tenants.get, clock=house.clock)
        door = Door(
            identify=lambda key: house.store.directory(house.pepper).identify(key, time.time()),
            administer=house.administer,
        )
        batches = Batches(ask=house.ask, files=files)
        app = build_app(self.router, settings, door=door, batches=batches, replays=Replays())
        self.transport = httpx.ASGITransport(app=app)

    def client(self, tenant: str = "acme") -> openai.AsyncOpenAI:
        client = httpx.AsyncClient(transport=self.transport, base_url="http://flow")
        key = self.house.keys[tenant]
        return openai.AsyncOpenAI(api_key=key, base_url="http://flow/v1", http_client=client, max_retries=0)

    async def tend(self) -> None:
        """Tend once, and let everything that was begun come to an end or wait for a step of a replica."""
        self.house.now += 0.5
        await self.worker.tend()
        await self.rest()

    async def rest(self) -> None:
        """Wait for work in threads: until each line has reached a replica, and files are checked or written."""
        await settle()
        if jobs := [task for (_, number), task in self.worker._tasks.items() if not number]:
            await asyncio.wait(jobs)
        for _ in range(50):
            if self.worker.num_at_work <= sum(each.num_live for each in self.backends):
                break
            await asyncio.sleep(0.001)
        await settle()

    async def until(self, batch_id: str, *states: str, tenant: str = "acme") -> openai.types.Batch:
        """Tend until the batch is in one of these states."""
        client = self.client(tenant)
        for _ in range(2000):
            batch = await client.batches.retrieve(batch_id)
            if batch.status in (states or ENDED):
                return batch
            await self.tend()
        raise AssertionError(f"the batch is {batch.status}")

    async def kill(self) -> None:
        """As by kill -9: nothing is told to anybody."""
        await self.worker.close()
        await self.fleet.close()


def backend(number: int = 0, *, model: str = "tiny", slots: int = 8, is_stepped: bool = False) -> FakeBackend:
    card = replace(model_card(model), max_num_sequences=slots, max_waiting=100)
    return FakeBackend(replica_card(f"r{number}", card), is_stepped=is_stepped)


def requests(number: int, **more: object) -> list[dict[str, object]]:
    """So many lines of an input file."""
    return [
        {
            "custom_id": f"own-{each}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": "a b c", "max_tokens": 4, **more},
        }
        for each in range(number)
    ]


def jsonl(lines: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def sent(node: Node, content: bytes, tenant: str = "acme") -> str:
    file = await node.client(tenant).files.create(file=("in.jsonl", content), purpose="batch")
    return file.id


async def created(
    node: Node, content: bytes, tenant: str = "acme", *, endpoint: str = "/v1/completions"
) -> openai.types.Batch:
    file_id = await sent(node, content, tenant)
    return await node.client(tenant).batches.create(
        input_file_id=file_id,
        endpoint=endpoint,
        completion_window="24h",
        metadata={"job": "nightly"},  # type: ignore[arg-type]
    )
