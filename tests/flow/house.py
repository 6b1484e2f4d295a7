"""The application over a real store of tenants, without Ray between."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.types import ASGIApp

from serve_app.core.errors import InvalidRequest, NotFound
from serve_app.http.app import build_app
from serve_app.http.file_routes import Batches
from serve_app.http.guard import Door
from serve_app.http.settings import HttpSettings
from serve_app.router.batch_files import BatchFiles
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router, RouterConfig
from serve_app.router.run import RunSettings
from serve_app.tenants.admin_service import AdminService
from serve_app.tenants.errors import NotThere, TenancyError
from serve_app.tenants.opening import open_store
from serve_app.tenants.store import Author
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card

PEPPER = "p" * 32


class House:
    """A store, its admin service, and the application that asks it about every key."""

    def __init__(self, folder: Path) -> None:
        url = f"sqlite:///{folder / 'kept.db'}"
        self.store, pepper = open_store(url, pepper_file=folder / "none", environment=PEPPER)
        self.admin_service = AdminService(self.store, pepper)
        self.admin = str(self.admin_service.answer("create_admin_key", {}, Author(name="test", at=0.0))["key"])
        self.fleet = Fleet("router-0")
        self.backend = FakeBackend(replica_card("r0", model_card("tiny", adapter_card("sql"))))
        door = Door(
            identify=lambda key: self.store.directory(pepper).identify(key, time.time()),
            origins=lambda: self.store.directory(pepper).origins,
            administer=self.administer,
        )
        settings = HttpSettings(max_body_bytes=50_000, cors_origins=("https://console.example",))
        self.batches = Batches(ask=self._ask, files=BatchFiles(folder / "files"))
        router = Router(self.fleet, RouterConfig(run=RunSettings(max_pause_s=0.0)))
        self.app = build_app(router, settings, door=door, batches=self.batches)

    @asynccontextmanager
    async def kept_open(self) -> AsyncIterator[ASGIApp]:
        """The application, in the event loop that it is asked in."""
        self.fleet.put(self.backend.card, self.backend)
        yield self.app
        await self.fleet.close()

    async def administer(self, service: str, arguments: Mapping[str, object], actor: str) -> Mapping[str, object]:
        try:
            return self.admin_service.answer(service, arguments, Author(name=actor, at=time.time()))
        except NotThere as error:
            raise NotFound(str(error)) from error
        except TenancyError as error:
            raise InvalidRequest(str(error)) from error

    async def _ask(self, method: str, *arguments: object) -> object:
        found: object = getattr(self.admin_service.batches, method)(*arguments)
        return found

    def key(self, tenant: str, **declared: object) -> dict[str, str]:
        """Headers with the key of a new tenant."""
        by = Author(name="test", at=0.0)
        self.admin_service.answer("add_tenant", {"name": tenant, **declared}, by)
        return bearing(str(self.admin_service.answer("create_key", {"tenant": tenant}, by)["key"]))


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
