"""The router's table of replicas: who serves which model, and what can be asked for at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

from serve_app.catalog.resolve import Catalog
from serve_app.core.backend import Backend
from serve_app.core.cards import ModelCard, ReplicaCard
from serve_app.core.delta import Load
from serve_app.core.errors import ModelLoading
from serve_app.core.names import ModelRef
from serve_app.core.tenants import Rights
from serve_app.router.counts import Counts
from serve_app.router.link import ReplicaLink
from serve_app.router.room import Room
from serve_app.router.view import View

logger = logging.getLogger(__name__)

LOADING_RETRY_S = 5.0


class Fleet:
    """Links by replica id, and the catalog of what their cards say. The only owner of both.

    version: grows with every change of its cards and aliases
    counts:  what its replicas spent, those that are gone included

    Deployments call `put` for every replica they see, as often as they look, `remove` for those gone, and
    `expect` with the models that ought to exist.
    """

    def __init__(
        self,
        router_id: str,
        *,
        aliases: Mapping[str, str] | None = None,
        loading_retry_s: float = LOADING_RETRY_S,
    ) -> None:
        self._router_id = router_id
        self._aliases = dict(aliases or {})
        self._loading_retry_s = loading_retry_s
        self._links: dict[str, ReplicaLink] = {}
        self._retired: dict[str, ReplicaLink] = {}
        self._expected: frozenset[str] = frozenset()
        self._cards: dict[str, ModelCard] = {}
        Catalog((), self._aliases)  # raises where the aliases contradict themselves
        self.version = 0
        self.counts = Counts()
        self._everything = self.seen_with(Rights())

    @property
    def router_id(self) -> str:
        return self._router_id

    @property
    def cards(self) -> Mapping[str, ModelCard]:
        """Models with a ready replica, by name; where replicas differ, the last one heard of."""
        return self._cards

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    @property
    def replicas(self) -> list[tuple[ReplicaCard, Load]]:
        """Every replica that takes requests, with its load as last heard of."""
        return [(link.card, link.load) for link in self._links.values() if link.is_open]

    @property
    def rooms(self) -> dict[str, Room]:
        """What the replicas that take requests can hold, by model; without models whose replicas do not say."""
        rooms: dict[str, Room] = {}
        for link in self._links.values():
            room = link.room if link.is_open else None
            if room is not None:
                name = link.card.model.name
                rooms[name] = rooms[name] + room if name in rooms else room
        return rooms

    @property
    def loading(self) -> list[str]:
        """Known models without a ready replica."""
        known = self._expected | {link.card.model.name for link in self._links.values()}
        return sorted(known - set(self._cards))

    @property
    def is_ready(self) -> bool:
        """Whether at least one model is known and each has a ready replica."""
        return bool(self._cards) and not self.loading

    def put(self, card: ReplicaCard, backend: Backend) -> ReplicaLink:
        """Take a replica in, refresh its card, or reconnect where the old link was lost."""
        self.hear(card)
        link = self._links.pop(card.replica_id, None) or self._retired.pop(card.replica_id, None)
        if link is not None and link.readmit():
            link.refresh(card)
        else:
            on_spent = partial(self.counts.note, card.replica_id, card.model.name)
            link = ReplicaLink(backend, card, self._router_id, on_lost=self._refresh, on_spent=on_spent)
            link.start()
        self._links[card.replica_id] = link  # last: the newest card speaks for its model
        self._refresh()
        return link

    def hear(self, card: ReplicaCard) -> None:
        """What a replica says that it spent, also one that is left already."""
        self.counts.note(card.replica_id, card.model.name, card.news.spent)

    def remove(self, replica_id: str) -> None:
        """Send nothing more to a replica. What it computes goes on, as a replica drains before it ends."""
        link = self._links.pop(replica_id, None)
        if link is not None:
            self._retired = {i: old for i, old in self._retired.items() if old.num_outstanding}
            self._retired[replica_id] = link
            link.retire()
            self._refresh()

    def expect(self, models: Iterable[str]) -> None:
        """Name the base models that are deployed, ready or not."""
        self._expected = frozenset(models)

    def rename(self, aliases: Mapping[str, str]) -> None:
        """Replace all aliases. Raises CatalogError, and changes nothing, where they go in a circle."""
        Catalog((), aliases)
        self._aliases = dict(aliases)
        self._note_change()

    def resolve(self, name: str) -> ModelRef:
        """What a name means to who may use everything. Raises as `View.resolve`."""
        return self._everything.resolve(name)

    def seen_with(self, rights: Rights) -> View:
        """The fleet as far as these rights go."""
        return View(self, rights)

    def links_for(self, ref: ModelRef) -> list[ReplicaLink]:
        """Open links to replicas that have the model and exactly that version of the adapter.

        Raises ModelLoading where there is none.
        """
        links = [link for link in self._links.values() if link.is_open and _serves(link.card.model, ref)]
        if not links:
            raise self.not_ready(ref.name)
        return links

    def not_ready(self, name: str) -> ModelLoading:
        return ModelLoading(
            f'No replica of model "{name}" is ready yet; retry in {self._loading_retry_s:g} s.',
            "model",
            {"retry_after_s": self._loading_retry_s},
        )

    async def close(self) -> None:
        """Leave every replica."""
        links = [*self._links.values(), *self._retired.values()]
        self._links.clear()
        self._retired.clear()
        await asyncio.gather(*(link.close() for link in links))
        self._refresh()

    def _refresh(self) -> None:
        cards = {link.card.model.name: link.card.model for link in self._links.values() if link.is_open}
        if cards != self._cards:
            self._cards = cards
            self._note_change()

    def _note_change(self) -> None:
        self.version += 1
        hidden = Catalog(self._cards.values(), self._aliases).hidden_aliases
        if hidden:
            logger.warning("aliases hidden by served names: %s", ", ".join(hidden))


def _serves(card: ModelCard, ref: ModelRef) -> bool:
    return card.name == ref.base and card.has(ref)
