"""Which adapter versions names mean on this replica: what lies in its folder, then what the fleet has published."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from serve_app.core.adapters import AdapterSet
from serve_app.core.cards import AdapterCard, AdapterRecord, ModelCard
from serve_app.core.errors import AdapterUnusable, InvalidRequest, ServeError, Unavailable
from serve_app.replica.engine import Adapters

logger = logging.getLogger(__name__)


class AdapterFiles(Protocol):
    """Where files of published adapters come from. It blocks; one thread at a time uses it."""

    def read(self, path: str, name: str, version: str) -> AdapterRecord:
        """Read a version from its folder or address; the record has the reason if something is wrong with the files.

        Raises InvalidRequest and Unavailable for what cannot be fetched.
        """
        ...

    def release(self, versions: Iterable[str]) -> None:
        """Note that the files of these are not read again."""
        ...


TakeAdapter = Callable[[AdapterRecord], Future[AdapterCard]]
KEPT_S = 600.0
"""A version that nothing means any more can be asked for so much longer: requests for it are on their way."""

Meaning = tuple[str, str]
"""A name and a version."""


class ServedAdapters:
    """Keeps the versions that a replica can compute, and which of them each name means. Lives on one event loop.

    card:  the model's, with the adapters of its folder; `apply` replaces it
    told:  by router, the revision of the adapters on the card that it was given last
    used:  versions that open requests use
    clock: seconds, monotonic
    """

    def __init__(
        self,
        card: ModelCard,
        engine: Adapters,
        *,
        files: AdapterFiles | None,
        used: Callable[[], frozenset[str]],
        clock: Callable[[], float],
    ) -> None:
        self.card = card
        self._engine = engine
        self._files = files
        self._used = used
        self._clock = clock
        self._in_folder = {each.name: each for each in card.adapters}
        self._known = {each.version: each for each in card.usable_adapters}
        self._staged_at: dict[str, float] = {}
        self._meant_at: dict[Meaning, float] = {}
        self._changing = asyncio.Lock()
        self.told: dict[str, int] = {}

    @property
    def num_behind(self) -> int:
        """Return how many routers were not given the card as it is."""
        return sum(revision < self.card.adapters_revision for revision in self.told.values())

    def tell(self, router_id: str) -> None:
        """Note that a router is given the card."""
        self.told[router_id] = self.card.adapters_revision

    async def stage(self, name: str, path: str, version: str) -> AdapterCard:
        """Bring a version into memory and try it; names mean what they meant. One that is there costs nothing.

        Raises AdapterUnusable with the reason, InvalidRequest where the files are of another version, and Overloaded.
        """
        async with self._changing:
            if version not in self._known or not self._engine.is_resident(version):
                await self._take(name, path, version, self._engine.stage)
            self._staged_at[version] = self._clock()
            return self._named(name, path, version)

    async def apply(self, published: AdapterSet) -> ModelCard:
        """Let names mean what a set says, and drop versions that nothing means and nobody uses; return the card.

        What cannot be served is on the card with the reason. An older set changes nothing.
        """
        async with self._changing:
            if published.revision < self.card.adapters_revision or self._is_applied(published):
                return self.card
            base = self.card.name
            hidden = published.withdrawn_of(base)
            meant = {name: card for name, card in self._in_folder.items() if name not in hidden}
            before: list[AdapterCard] = []  # and canaries
            for each in published.of(base):
                meant[each.name] = await self._bound(each.name, each.path, each.version)
                if each.previous is not None:
                    previous, path = each.previous
                    before.append(await self._bound(each.name, path, previous))
                if each.canary is not None:
                    before.append(await self._bound(each.name, each.canary.path, each.canary.version))
                    meant[each.name] = replace(meant[each.name], canary=(each.canary.version, each.canary.share))
            overwritten = [card for card in before if card.root == meant[card.name].root]
            self._engine.keep(frozenset(card.version for card in overwritten))
            self._mean(meant, before, published)
            await self._forget(kept=[*meant.values(), *before])
            return self.card

    def _is_applied(self, published: AdapterSet) -> bool:
        """Return whether the card is what the set says already; what could not be served is tried again."""
        is_whole = all(each.is_usable or each.name in self._in_folder for each in self.card.adapters)
        return published.revision == self.card.adapters_revision and is_whole

    async def _bound(self, name: str, path: str, version: str) -> AdapterCard:
        try:
            if version not in self._known:
                await self._take(name, path, version, self._engine.bind)
        except ServeError as error:
            logger.warning("adapter %s in version %s: %s", name, version, error)
            may_come = isinstance(error, Unavailable)
            return AdapterCard(name=name, version=version, root=path, reason=error.message, may_come=may_come)
        return self._named(name, path, version)

    async def _take(self, name: str, path: str, version: str, take: TakeAdapter) -> None:
        """Read a version, and have the engine know it. Its files are released again if that fails."""
        if self._files is None:
            raise AdapterUnusable.because(name, "this replica takes none")
        try:
            record = await self._record(name, path, version, files=self._files)
            self._known[version] = await asyncio.wrap_future(take(record))
        except BaseException:
            self._release(version)
            raise

    def _release(self, *versions: str) -> None:
        if self._files is not None:
            self._files.release(set(versions) - self._known.keys())

    @staticmethod
    async def _record(name: str, path: str, version: str, *, files: AdapterFiles) -> AdapterRecord:
        record = await asyncio.to_thread(files.read, path, name, version)
        if record.reason is not None:
            raise AdapterUnusable.because(name, record.reason)
        if record.version != version:
            must, found = f"have the files of version {version}", f"version {record.version}, so they changed meanwhile"
            raise InvalidRequest.refusing(name, must=must, found=found, remedy="Publish the folder again.")
        return record

    def _named(self, name: str, path: str, version: str) -> AdapterCard:
        return replace(self._known[version], name=name, root=path)

    def _mean(self, meant: dict[str, AdapterCard], before: Iterable[AdapterCard], published: AdapterSet) -> None:
        """Replace the card; a version that a name meant stays at hand for requests that were given it.

        Of a name that is withdrawn none does. What runs goes on.
        """
        now, used, withdrawn = self._clock(), self._used(), published.withdrawn_of(self.card.name)
        current = {(card.name, card.version) for card in meant.values()}
        for card in (*self.card.adapters, *(each for each in before if each.is_usable)):
            self._meant_at[card.name, card.version] = now
            if card.canary is not None:  # requests that were given it are on their way, also when it is rolled back
                self._meant_at[card.name, card.canary[0]] = now
        lasting = {(card.name, card.version) for card in before}
        self._meant_at = {
            (name, version): at
            for (name, version), at in self._meant_at.items()
            if name not in withdrawn
            and version in self._known
            and (now - at < KEPT_S or version in used or (name, version) in lasting)
        }
        staged = [replace(self._known[version], name=name) for name, version in self._meant_at.keys() - current]
        self.card = replace(
            self.card,
            adapters=tuple(card for _, card in sorted(meant.items())),
            staged=tuple(sorted(staged, key=lambda card: (card.name, card.version))),
            adapters_revision=published.revision,
        )

    async def _forget(self, kept: Iterable[AdapterCard]) -> None:
        """Drop versions that are neither meant, nor staged, nor used."""
        now = self._clock()
        self._staged_at = {version: at for version, at in self._staged_at.items() if now - at < KEPT_S}
        needed = {card.version for card in (*kept, *self.card.staged, *self._in_folder.values())}
        unneeded = self._known.keys() - needed - self._staged_at.keys() - self._used()
        if unneeded:
            gone = await asyncio.wrap_future(self._engine.drop(frozenset(unneeded)))
            for version in gone:
                self._known.pop(version, None)
            self._release(*gone)
