"""Keeps a router's fleet equal to what runs: looks again and again, and believes only what it sees."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from serve_app.core.backend import Backend
from serve_app.core.cards import ModelCard, ReplicaCard, Scale
from serve_app.core.errors import ServeError
from serve_app.router.patience import patience
from serve_app.router.publishing import HELLO_TIMEOUT_S, Publishing

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
HURRIED_PERIOD_S, LEAST_PERIOD_S = 0.15, 0.05
ANSWER_S = 2.0
"""A cluster that does not tell its applications for so long is asked on, while those of before are greeted."""
ALONE_TIMEOUT_S = 0.5
"""For the answer of one which was not among all replicas (`HELLO_TIMEOUT_S`) and is asked alone: what fails does so at
once. Both and a period must fit a replica's lease: leases are renewed by hellos."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """The replicas of one application that answered.

    is_complete: nobody failed to answer, so a replica that is not here does not exist
    asleep:      what is known of the model, if it was scaled to zero, and a first request starts a replica
    """

    cards: tuple[ReplicaCard, ...]
    is_complete: bool
    asleep: ModelCard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """An application with a base model.

    is_coming:  it is ready or may become so
    has_failed: its deployment has failed; what is neither is being deleted
    scale:      its replicas; None where nobody has told yet
    num_running: those of its replicas that take requests
    """

    model: str
    is_coming: bool
    has_failed: bool = False
    scale: Scale | None = None
    num_running: int = 0


class Cluster(Protocol):
    """Where models are deployed."""

    async def applications(self) -> Mapping[str, Deployed]:
        """Every application that has a base model, by its name."""
        ...

    async def greet(self, application: str, router_id: str, heard: Mapping[str, int]) -> Sighting:
        """Say hello to every running replica of an application, which also renews the router's leases there.

        heard: as of `Backend.hello`
        """
        ...

    def backend(self, application: str, replica_id: str) -> Backend:
        """The way to one replica."""
        ...

    @property
    def is_deleted(self) -> bool:
        """Whether the router's own application was being deleted when `applications` was asked last."""
        ...


class Discovery:
    """Owns the ways to the replicas of each application; tells of every difference.

    on_deleted: called with every look from the one on which finds the router's own application going
    running: models of which a replica took requests at the last look; None before the cluster has told its applications
    """

    def __init__(
        self, cluster: Cluster, publishing: Publishing, router_id: str, *, on_deleted: Callable[[], None] = lambda: None
    ) -> None:
        self._cluster = cluster
        self._publishing, self._fleet = publishing, publishing.fleet
        self._router_id = router_id
        self._on_deleted = on_deleted
        self._known: dict[str, dict[str, Backend]] = {}
        self._leaving: dict[str, tuple[str, Backend]] = {}  # with the application
        self._asleep: set[str] = set()
        self._heard: dict[str, int] = {}
        self._is_something_missing = True
        self.running: frozenset[str] | None = None
        self._deployed: Mapping[str, Deployed] | None = None
        self._asking: asyncio.Task[Mapping[str, Deployed]] | None = None
        self._is_hurried = asyncio.Event()

    def hurry(self) -> None:
        """Look at once: what a replica said of itself is so no more."""
        self._is_hurried.set()

    async def run(self) -> None:
        """Look for ever: once a second, at once if hurried, and faster while something is not ready.

        However often it is hurried, there is a least time between two looks.
        """
        while True:
            self._is_hurried.clear()
            try:
                await self.look()
            except Exception:
                logger.warning("could not look at the cluster; what was known stays", exc_info=True)
            await asyncio.sleep(LEAST_PERIOD_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(HURRIED_PERIOD_S if self._is_something_missing else PERIOD_S):
                    await self._is_hurried.wait()

    async def look(self) -> None:
        """One pass over all applications; what goes wrong with one is that one's alone."""
        deployed = await self._applications()
        if self._cluster.is_deleted:
            self._on_deleted()
        self._fleet.expect(
            [each.model for each in deployed.values() if each.is_coming],
            [each.model for each in deployed.values() if each.has_failed],
            {each.model: each.scale for each in deployed.values() if each.scale is not None},
        )
        for application in self._known.keys() - deployed.keys():
            for replica_id in list(self._known[application]):
                self._forget(application, replica_id)
            del self._known[application]
        looks = (self._look_at(application, each.model) for application, each in deployed.items())
        await asyncio.gather(*looks, *map(self._renew, list(self._leaving)))
        self._is_something_missing = not deployed or any(
            each.is_coming and application not in self._asleep and not self._known.get(application)
            for application, each in deployed.items()
        )
        if self._deployed is not None:
            self.running = frozenset(each.model for each in deployed.values() if each.num_running)

    async def _applications(self) -> Mapping[str, Deployed]:
        """Every application, as last told where the cluster does not answer: leases end if nobody greets meanwhile."""
        self._asking = self._asking or asyncio.ensure_future(self._cluster.applications())
        try:
            async with patience(ANSWER_S):
                self._deployed = await asyncio.shield(self._asking)
        except Exception as error:
            logger.warning("the cluster could not be asked for its applications; what was known stays: %r", error)
        if self._asking.done():
            self._asking = None
        return self._deployed or {}

    async def _look_at(self, application: str, model: str) -> None:
        known = self._known.setdefault(application, {})
        sighting = await self._greet(application)
        (self._asleep.add if sighting.asleep else self._asleep.discard)(application)
        self._publishing.rest(model, sighting.asleep)
        for card in sighting.cards:
            self._meet(application, card)
        missing = known.keys() - {card.replica_id for card in sighting.cards}
        if sighting.is_complete:
            for replica_id in missing:
                self._forget(application, replica_id)
        else:
            await asyncio.gather(*(self._ask(application, replica_id) for replica_id in missing))

    async def _greet(self, application: str) -> Sighting:
        try:
            async with patience(HELLO_TIMEOUT_S):
                return await self._cluster.greet(application, self._router_id, self._heard)
        except Exception as error:
            logger.debug("application %s did not answer: %r", application, error)
            return Sighting(cards=(), is_complete=False)

    async def _ask(self, application: str, replica_id: str) -> None:
        """Speak to a known replica alone. One that is only slow stays: Serve replaces it if it stays slow."""
        try:
            async with patience(ALONE_TIMEOUT_S):
                way = self._known[application][replica_id]
                self._meet(application, await way.hello(self._router_id, self._heard))
        except TimeoutError:
            logger.info("replica %s of %s is slow to answer", replica_id, application)
        except ServeError:
            self._forget(application, replica_id)

    def _meet(self, application: str, card: ReplicaCard) -> None:
        known = self._known[application]
        if card.replica_id not in known:
            known[card.replica_id] = self._cluster.backend(application, card.replica_id)
        self._heard[card.replica_id] = card.news.until
        self._publishing.put(card, known[card.replica_id])

    def _forget(self, application: str, replica_id: str) -> None:
        """Use the replica no more. It may still drain, so its lease is renewed until it cannot be reached."""
        self._leaving[replica_id] = application, self._known[application].pop(replica_id)
        self._publishing.remove(replica_id)

    async def _renew(self, replica_id: str) -> None:
        """Renew the lease, but not of an idle replica of a sleeping model: Serve would take the call for a request."""
        application, way = self._leaving[replica_id]
        if application in self._asleep and self._fleet.is_done_with(replica_id):
            del self._leaving[replica_id]
            self._heard.pop(replica_id, None)
            return
        try:
            async with patience(HELLO_TIMEOUT_S):
                card = await way.hello(self._router_id, self._heard)
            self._heard[replica_id] = card.news.until
            self._fleet.hear(card)
        except TimeoutError:
            logger.info("replica %s, which leaves, is slow to answer", replica_id)
        except ServeError:
            del self._leaving[replica_id]
            self._heard.pop(replica_id, None)
