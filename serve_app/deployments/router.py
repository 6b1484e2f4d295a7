"""The deployment of the router: HTTP in front, a fleet behind, and the loop that keeps the fleet true."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.dialects import DIALECTS
from serve_app.core.batches import DEFAULT_FOLDER
from serve_app.core.errors import Unavailable
from serve_app.deployments.arguments import RouterSettings
from serve_app.deployments.logs import log_as_configured
from serve_app.deployments.ray_private import http_host
from serve_app.deployments.serve_cluster import ServeCluster
from serve_app.deployments.transport import calls_of
from serve_app.http.app import build_app
from serve_app.http.batch_lines import line_answers
from serve_app.http.file_routes import Batches
from serve_app.http.guard import Door, door_without_keys
from serve_app.http.metrics import Metrics
from serve_app.http.settings import ClientSettings, HttpSettings
from serve_app.observe.switch import Switch
from serve_app.router.accounting import Accounting
from serve_app.router.accounts import AccountsClient
from serve_app.router.admission import Admission
from serve_app.router.batch_files import BatchFiles
from serve_app.router.batch_worker import BatchWorker
from serve_app.router.discovery import Discovery
from serve_app.router.fleet import Fleet
from serve_app.router.idempotency import Replays, ReplaySettings
from serve_app.router.ledger_writer import LedgerWriter
from serve_app.router.patience import begin
from serve_app.router.published_sources import FileSource, Source
from serve_app.router.publishing import Publishing
from serve_app.router.quotas import Quotas
from serve_app.router.rollouts import Rollouts
from serve_app.router.router import Router, RouterConfig
from serve_app.router.run import RunSettings
from serve_app.router.shadow import Shadows
from serve_app.router.waking import Waker
from serve_app.router.watching import Watching
from serve_app.tenants.published import DEFAULT_FILE, PublishedFile

GC_THRESHOLD = (50_000, 20, 50)
"""For a crowd's open requests: Python's own threshold has the router look through all of them for seconds on end."""
INFORMED_WITHIN_S, LOOK_S = 10.0, 0.05
"""How long a new router waits for keys and models before it takes requests, and between two looks at them."""
STOPPED = Unavailable("The server is being stopped; retry.", None, {"retry_after_s": 5})


class RouterReplica:
    """One replica of the router, as Serve holds it. Stateless but for what it is told of models again and again.

    accounts: where tenants, keys and published adapters are kept; None where there is no such deployment
    adapters_file: where published adapters are kept then
    files: the folder of the files of batches, where there are accounts
    """

    user_config_schema: ClassVar[type[BaseModel]] = RouterSettings
    _batch_worker: BatchWorker | None = None

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self,
        accounts: DeploymentHandle[Any] | None = None,
        adapters_file: str = DEFAULT_FILE,
        files: str = DEFAULT_FOLDER,
    ) -> None:
        log_as_configured()
        gc.set_threshold(*GC_THRESHOLD)
        context = serve.get_replica_context()
        router_id = f"router-{context.replica_id.unique_id}"
        self._host = await asyncio.to_thread(http_host)
        self._replays = Replays()
        self._fleet = Fleet(router_id)
        self._admission = Admission(lambda: self._fleet.rooms)
        self._accounts: AccountsClient | None = None
        source = self._source(accounts, adapters_file, router_id)
        self._publishing = Publishing(self._fleet, source)
        self._shadows = Shadows(self._fleet, self._admission)
        self._rollouts = Rollouts(self._publishing, self._fleet)
        self._batch_tally: Counter[str] = Counter()
        self._metrics = self._metrics_of(router_id)
        self._accounting: Accounting | None = None
        if (ledger := self._accounts) is not None:
            self._accounting = Accounting(Quotas(router_id, ledger), LedgerWriter(ledger, self._fleet.counts))
        self._tracing = Switch(os.environ)
        cluster = ServeCluster(context.app_name)
        self._waker = Waker(self._fleet, partial(cluster.wake, router_id=router_id))
        self._files = BatchFiles(Path(files))
        self._app = self._app_for(RouterSettings())
        discovery = Discovery(cluster, self._publishing, router_id, on_deleted=self._stop)
        self._fleet.on_outdated = discovery.hurry
        self._discovery = begin(discovery.run())
        self._hearing = begin(source.run())
        self._watching = begin(Watching(self._fleet, self._publishing).run())
        self._looking = begin(self._fleet.watch())
        self._writing: list[asyncio.Task[None]] = []
        if self._accounting is not None:
            self._writing += [begin(self._accounting.quotas.run()), begin(self._accounting.ledger_writer.run())]
        await until_informed(source, discovery, self._fleet)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def serve_by_latest_settings(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app(scope, receive, send)

        return serve_by_latest_settings

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take over new settings; requests that run keep theirs."""
        settings = RouterSettings.model_validate(user_config)
        self._fleet.rename(settings.aliases)
        self._fleet.placement.policy = settings.placement
        self._publishing.roots = settings.adapter_roots
        self._admission.settings = settings
        self._rollouts.settings = settings.rollout
        if self._accounts is not None:
            self._accounts.held.grace_s = settings.auth_grace_s
            self._accounts.prices = settings.known_prices
        if self._accounting is not None:
            self._accounting.prices = settings.known_prices
        self._replays.settings = ReplaySettings(seconds=settings.idempotency_s)
        self._app = self._app_for(settings)

    async def drain(self, seconds: float) -> None:
        """Answer what is open, for so long at most, and refuse what comes, before the application is deleted.

        Its accounts are still there by then: the ledger is told of every request.
        """
        await self._admission.drain(STOPPED, seconds=seconds)
        if self._accounting is not None:
            with suppress(Unavailable):
                await self._accounting.ledger_writer.flush()

    async def check_health(self) -> None:
        """Called by Serve; three failures in a row and the replica is replaced."""
        if self._discovery.done() or self._looking.done():
            raise RuntimeError("the router no longer looks for models")
        if self._hearing.done():
            raise RuntimeError("the router no longer hears of tenants and adapters")

    async def __del__(self) -> None:
        """Awaited by Serve once the replica has drained."""
        discovery: asyncio.Task[None] | None = getattr(self, "_discovery", None)
        if discovery is not None:
            discovery.cancel()
            self._hearing.cancel()
            self._watching.cancel()
            self._looking.cancel()
            if self._batch_worker is not None:
                self._batching.cancel()
                await self._batch_worker.close()
            self._stop()
            await self._fleet.close()
            await asyncio.to_thread(self._tracing.close)
            for each in self._writing:
                each.cancel()
            if self._accounting is not None:
                with suppress(Unavailable):  # then it is unattributed
                    await self._accounting.ledger_writer.flush()

    def _source(
        self, accounts: DeploymentHandle[Any] | None, adapters_file: str, router_id: str
    ) -> AccountsClient | FileSource:
        """Return where published adapters are kept, and note the accounts, if there are any."""
        if accounts is None:
            return FileSource(PublishedFile(Path(adapters_file)), on_look=self._bring_adapters)
        kept, on_look, grace_s = self._replays.kept, self._note_look, RouterSettings().auth_grace_s
        self._accounts = AccountsClient(calls_of(accounts), router_id, grace_s=grace_s, kept=kept, on_look=on_look)
        return self._accounts

    def _metrics_of(self, router_id: str) -> Metrics:
        publishing = self._publishing
        return Metrics(
            self._fleet,
            router_id=router_id,
            admission=self._admission,
            rollouts=self._rollouts,
            revision=lambda: publishing.known.revision,
            tallies=self._shadows.tallies,
            batches=self._batch_tally,
        )

    def _note_look(self, is_good: Callable[[str], bool]) -> None:
        self._admission.end_keys(is_good)
        self._bring_adapters()

    def _bring_adapters(self) -> None:
        self._publishing.refresh()
        self._rollouts.look()

    def _stop(self) -> None:
        """Tell every client that is still here, before the connections are closed."""
        self._admission.stop(STOPPED)

    def _app_for(self, settings: RouterSettings) -> ASGIApp:
        config = RouterConfig(
            run=run_settings(settings),
            dialect=DIALECTS[settings.dialect],
            accepts_any_model=settings.accept_any_model,
        )
        asks_for_keys = settings.asks_for_keys(has_accounts=self._accounts is not None)
        accounting = self._accounting if asks_for_keys else None
        router = Router(
            self._fleet,
            config,
            admission=self._admission,
            accounting=accounting,
            waker=self._waker,
            rollouts=self._rollouts,
            shadows=self._shadows,
        )
        http_settings = HttpSettings(
            **{each.name: getattr(settings, each.name) for each in fields(ClientSettings)},
            sends_request_id=False,  # Serve does
            trace=self._tracing.turned(settings.tracing),
        )
        return build_app(
            router,
            http_settings,
            metrics=self._metrics,
            door=door_for(settings, self._accounts, self._host),
            replays=self._replays,
            book=self._accounts if asks_for_keys else None,
            publishing=self._publishing,
            batches=self._batches_with(router, http_settings) if asks_for_keys else None,
        )

    def _batches_with(self, router: Router, settings: HttpSettings) -> Batches | None:
        """Have the batches computed by this router and within these settings, from now on."""
        accounts = self._accounts
        if accounts is None:
            return None
        answer = line_answers(settings)
        if self._batch_worker is None:
            self._batch_worker = BatchWorker(
                accounts.batches, router, self._files, answer, accounts.tenant, tally=self._batch_tally
            )
            self._batching = begin(self._batch_worker.run())
        else:
            self._batch_worker.take_over(router, answer)
        return Batches(ask=accounts.batches, files=self._files)


async def until_informed(
    source: Source, discovery: Discovery, fleet: Fleet, *, within_s: float = INFORMED_WITHIN_S
) -> None:
    """Wait until keys, published adapters and every model that runs are known.

    A router that took requests before would refuse what others serve. After `within_s` it takes them all the same.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not _is_informed(source, discovery, fleet):  # noqa: ASYNC110 - of three owners, who tell nobody
                await asyncio.sleep(LOOK_S)


def _is_informed(source: Source, discovery: Discovery, fleet: Fleet) -> bool:
    return source.published is not None and discovery.running is not None and discovery.running <= fleet.cards.keys()


def run_settings(settings: RouterSettings) -> RunSettings:
    """Return the settings of runs as one plain dataclass.

    `dataclasses.replace`, which a client's time limit needs, resets most fields of a class with several bases.
    """
    return RunSettings(**{each.name: getattr(settings, each.name) for each in fields(RunSettings)})


def door_for(settings: RouterSettings, link: AccountsClient | None, host: str | None) -> Door:
    """Return who is let in. Raises ValueError where keys are asked for and nobody knows any; Serve then keeps what was
    before. Where no keys are asked for, only this machine may come: whoever started Serve may have checked nothing.

    host: that Serve listens on; None where there is no HTTP
    """
    if not settings.asks_for_keys(has_accounts=link is not None):
        return door_without_keys(host)
    if link is None:
        raise ValueError("`auth: keys` needs a store: set args.store of the router's application")
    return Door(
        identify=link.identify,
        look_again=link.look_again,
        origins=link.origins,
        administer=link.administer,
        shows_queues=settings.gateway_metrics,
    )
