"""The router's table of replicas: who serves which model, and what can be asked for at all."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from serve_app.api.dialects import ONLY_MODEL
from serve_app.catalog.aliases import Aliases, Order, addresses_of, heaviest_first, read_aliases
from serve_app.catalog.resolve import Catalog, Draw, Wanted, no_canary
from serve_app.core.backend import Backend
from serve_app.core.cards import NO_SCALES, AdapterCard, ModelCard, ReplicaCard, Scale
from serve_app.core.delta import Frame, Load
from serve_app.core.errors import ModelLoading, ModelNotFound, NotFound, ServeError
from serve_app.core.names import ModelRef
from serve_app.core.tenants import Rights
from serve_app.router.admission import Room
from serve_app.router.ledger_writer import Counts
from serve_app.router.link import ReplicaLink
from serve_app.router.placement import Placement

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Between two looks for replicas that are silent."""
LOADING_RETRY_S = 5.0
ASLEEP = "asleep"
"""The fact of ModelLoading that names the model to wake."""
NOT_READY = 'No replica of model "{}" is ready yet'
MIXED = 'No replica has all adapters of "{}" in the versions that most replicas have'
FAILED = 'Model "{}" could not be loaded, and its operator has to mend that'
SLEEPS = 'Model "{}" is asleep, and a request for a completion wakes it'
ALL_LOST = 'Every replica of model "{}" was lost'


class Fleet:
    """Links by replica id, and the catalog of what their cards say. The only owner of both.

    cards:   of models with a ready replica, by name, each as all of its open replicas have it together (`as_one`)
    scales:  how many replicas of each model are wanted, start and drain, as last told
    version: grows with every change of its cards and aliases
    counts:  what its replicas spent, those that are gone included
    placement: which of them gets which prompt
    on_outdated: called where a replica says that the card which is known of it is an older one

    Deployments call `put` for every replica they see, as often as they look, `remove` for those gone, and
    `expect` with the models that ought to exist.
    """

    def __init__(self, router_id: str, *, aliases: Mapping[str, object] | None = None) -> None:
        self.router_id = router_id
        self.aliases = read_aliases(aliases or {})  # raises where they contradict themselves
        self._links: dict[str, ReplicaLink] = {}
        self._retired: dict[str, ReplicaLink] = {}
        self._expected: frozenset[str] = frozenset()
        self._failed: frozenset[str] = frozenset()
        self.scales: dict[str, Scale] = {}
        self._asleep: dict[str, ModelCard] = {}
        self._remembered: dict[str, ModelCard] = {}
        self._reconnected: set[str] = set()
        self._told: dict[str, list[ModelCard]] = {}
        self.cards: dict[str, ModelCard] = {}
        self.version = 0
        self._changed = asyncio.Event()
        self.counts = Counts()
        self.placement = Placement()
        self.on_outdated: Callable[[], None] = lambda: None
        self._everything = self.seen_with(Rights())

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
        """Known models without a ready replica that may have one later."""
        known = self._expected | {link.card.model.name for link in self._links.values()}
        return sorted(known - set(self.cards) - self._failed - set(self.asleep))

    @property
    def is_known(self) -> bool:
        """Whether every replica that is said to run was met. Of a model that has failed fewer run than are wanted."""
        num_met = Counter(link.card.model.name for link in self._links.values())
        said = ((name, scale.wanted - scale.starting) for name, scale in self.scales.items())
        is_met = all(num_met[name] >= num_running for name, num_running in said if name not in self._failed)
        return bool(self._links or self.asleep) and not self.loading and is_met

    @property
    def asleep(self) -> Mapping[str, ModelCard]:
        """Models that were scaled to zero, by name, as they were last seen, or else as they are configured.

        The first request starts a replica.
        """
        names = sorted((self._asleep.keys() & self._expected) - set(self.cards) - self._failed)
        return {name: self._remembered.get(name, self._asleep[name]) for name in names}

    @property
    def failed(self) -> list[str]:
        """Models that could not be loaded: no replica is ready, and none will come by itself."""
        return sorted(self._failed - set(self.cards))

    @property
    def can_serve(self) -> bool:
        """Whether any model has a replica that is heard of, or is asleep."""
        return bool(self.asleep or self.links_of())

    @property
    def is_ready(self) -> bool:
        """Whether at least one model is known and each has a ready replica or is asleep."""
        return bool(self.cards or self.asleep) and not self.loading and not self.failed

    def put(self, card: ReplicaCard, backend: Backend) -> ReplicaLink:
        """Take a replica in, refresh its card, or reconnect where the old link was lost."""
        self.hear(card)
        self._reconnected.discard(card.replica_id)
        link = self._links.get(card.replica_id) or self._retired.pop(card.replica_id, None)
        if link is not None and link.is_deaf:
            link.drop("fell silent")
        if link is not None and link.readmit():
            link.refresh(card)
        else:
            link = self._connect(card, backend)
        self._links[card.replica_id] = link
        self.placement.warmth.hear(card)
        self._refresh()
        self._hand_over()
        return link

    async def watch(self) -> None:
        """Look for silent replicas for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Have what silent replicas compute go on at others.

        Time is counted in looks, so that a router that stood still blames nobody.
        """
        for link in (*self._links.values(), *self._retired.values()):
            if link.look() and link.num_outstanding:
                link.hand_over(partial(self._can_go_on, numerics=link.card.model.numerics))

    def _connect(self, card: ReplicaCard, backend: Backend) -> ReplicaLink:
        on_frame = partial(self._hear_frame, card.replica_id, card.model.name)
        on_lost = partial(self._note_loss, card.replica_id, backend)
        link = ReplicaLink(backend, card, self.router_id, on_lost=on_lost, on_frame=on_frame)
        link.start()
        return link

    def _hear_frame(self, replica_id: str, model: str, frame: Frame) -> None:
        self.counts.note(replica_id, model, frame.load.spent)
        link = self._links.get(replica_id)
        if link is not None and frame.adapters_revision > link.card.model.adapters_revision:
            self.on_outdated()

    def _note_loss(self, replica_id: str, backend: Backend) -> None:
        """Reconnect at once to a replica that has ended the stream itself, once until it is seen again.

        A router that stood still finds all of its leases expired when it goes on, and every replica healthy.
        """
        link = self._links.get(replica_id)
        self.placement.warmth.forget(replica_id)
        if link is not None and link.has_ended and replica_id not in self._reconnected:
            self._reconnected.add(replica_id)
            self._links[replica_id] = self._connect(link.card, backend)
        self._refresh()

    def links_of(self, base: str | None = None) -> list[ReplicaLink]:
        """Return open links to the replicas of a base model, or to all, without those that are quiet."""
        links = (each for each in self._links.values() if each.is_open and not each.is_quiet)
        return [each for each in links if base in (None, each.card.model.name)]

    @property
    def backends(self) -> tuple[list[Backend], list[Backend]]:
        """The ways to all replicas, and to those that were removed: these may drain, or be gone."""
        return [link.backend for link in self._links.values()], [link.backend for link in self._retired.values()]

    def update(self, replica_id: str, model: ModelCard) -> None:
        """Take over what a replica says of its model between two hellos."""
        if (link := self._links.get(replica_id)) is not None:
            link.refresh(replace(link.card, model=model))
            self._refresh()

    def hear(self, card: ReplicaCard) -> None:
        """What a replica says that it spent, also one that is left already."""
        self.counts.note(card.replica_id, card.model.name, card.news.spent)

    def remove(self, replica_id: str) -> None:
        """Send nothing more to a replica. What it computes goes on at others, or there where no other can."""
        link = self._links.pop(replica_id, None)
        self._reconnected.discard(replica_id)
        self.placement.warmth.forget(replica_id)
        if link is not None:
            self._retired = {i: old for i, old in self._retired.items() if old.num_outstanding}
            self._retired[replica_id] = link
            link.retire()
            self._refresh()
            self._hand_over()

    def expect(
        self, models: Iterable[str], failed: Iterable[str] = (), scales: Mapping[str, Scale] = NO_SCALES
    ) -> None:
        """Name the base models that are deployed, ready or not, and those whose deployment has failed.

        scales: replicas of models that are wanted, start and drain, as far as known
        """
        self._expected, self._failed, self.scales = frozenset(models), frozenset(failed), dict(scales)

    def rest(self, model: str, card: ModelCard | None) -> None:
        """Note how a model is configured that was scaled to zero, or with None that it was not."""
        self._asleep.pop(model, None)
        if card is not None:
            self._asleep[model] = card

    async def until_there(self, model: str) -> None:
        """Wait until a replica of the model is ready."""
        while model not in self.cards:
            await self._changed.wait()

    def is_done_with(self, replica_id: str) -> bool:
        """Return whether a replica that was removed computes nothing more for this router."""
        link = self._retired.get(replica_id)
        return replica_id not in self._links and (link is None or not link.num_outstanding)

    def rename(self, aliases: Mapping[str, object]) -> None:
        """Replace all aliases. Raises CatalogError, and changes nothing, for those that `read_aliases` refuses."""
        self.aliases = read_aliases(aliases)
        self._note_change()

    def resolve(self, name: str) -> ModelRef:
        """What a name means to who may use everything. Raises as `View.resolve`."""
        return self._everything.resolve(name)

    def seen_with(self, rights: Rights) -> View:
        """The fleet as far as these rights go."""
        return View(self, rights)

    def links_for(self, ref: ModelRef, numerics: str = "") -> list[ReplicaLink]:
        """Open links to replicas that have the model and exactly that version of the adapter; quiet ones if all are.

        numerics: as on their cards, where a completion is to go on; "" is any
        Raises ModelLoading where there is none.
        """
        links = self._links_that_serve(ref, numerics)
        if not links:
            is_mix = len(ref.parts) > 1 and ref.base in self.cards
            raise self.not_ready(ref.name, MIXED if is_mix else NOT_READY)
        return [link for link in links if not link.is_quiet] or links

    def _links_that_serve(self, ref: ModelRef, numerics: str) -> list[ReplicaLink]:
        open_ = ((link, link.card.model) for link in self._links.values() if link.is_open)
        found = ((link, card) for link, card in open_ if card.name == ref.base and card.has(ref))
        return [link for link, card in found if numerics in ("", card.numerics)]

    def _hand_over(self) -> None:
        """Have what retired replicas still compute go on at others that can; the rest goes on there."""
        for link in self._retired.values():
            if link.num_outstanding:
                link.hand_over(partial(self._can_go_on, numerics=link.card.model.numerics))

    def _can_go_on(self, ref: ModelRef, *, numerics: str) -> bool:
        return not all(link.is_quiet for link in self._links_that_serve(ref, numerics))

    def not_ready(self, name: str, what: str = NOT_READY) -> ModelLoading:
        what = FAILED if name in self.failed else what
        facts: dict[str, float | str] = {"retry_after_s": LOADING_RETRY_S}
        if name in self.asleep:
            what, facts = SLEEPS, facts | {ASLEEP: name}
        return ModelLoading(f"{what.format(name)}; retry in {LOADING_RETRY_S:g} s.", "model", facts)

    async def close(self) -> None:
        """Leave every replica."""
        links = [*self._links.values(), *self._retired.values()]
        self._links.clear()
        self._retired.clear()
        await asyncio.gather(*(link.close() for link in links))
        self._refresh()

    def _refresh(self) -> None:
        told: dict[str, list[ModelCard]] = {}
        for link in self._links.values():
            if link.is_open:
                told.setdefault(link.card.model.name, []).append(link.card.model)
        if told != self._told:
            self._told = told
            self.cards = {name: as_one(cards) for name, cards in told.items()}
            self._remembered |= self.cards
            self._note_change()

    def _note_change(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()
        hidden = Catalog(self.cards.values(), self.aliases).hidden_aliases
        if hidden:
            logger.warning("aliases hidden by served names: %s", ", ".join(hidden))


def as_one(cards: Sequence[ModelCard]) -> ModelCard:
    """Describe a model as its replicas have it together: as most of them say, with the adapters of all.

    Names mean what the replicas say that have applied the newest revision. Of several versions a name means one: one
    that can be used, that most replicas have, whose weights are the newest. What is still equal is decided by its text,
    so the order in which replicas answer decides nothing. All other versions can be pinned.
    """
    revision = max(card.adapters_revision for card in cards)
    bare = [replace(card, adapters=(), staged=(), adapters_revision=revision) for card in cards]
    versions: dict[str, list[AdapterCard]] = {}
    for card in cards:
        for adapter in card.adapters if card.adapters_revision == revision else ():
            versions.setdefault(adapter.name, []).append(adapter)
    adapters = tuple(max(found, key=partial(_weight, found)) for _, found in sorted(versions.items()))
    meant = {(each.name, each.version) for each in adapters}
    at_hand = {(each.name, each.version): each for card in cards for each in (*card.adapters, *card.staged)}
    staged = tuple(each for key, each in sorted(at_hand.items()) if key not in meant and each.is_usable)
    most = max(bare, key=lambda card: (bare.count(card), card.created, repr(card)))
    return replace(most, adapters=adapters, staged=staged)


def _weight(found: Sequence[AdapterCard], card: AdapterCard) -> tuple[object, ...]:
    num_replicas = sum((each.version, each.is_usable) == (card.version, card.is_usable) for each in found)
    return card.is_usable, num_replicas, card.created, card.version, repr(card)


MAX_NAMED = 10


class View:
    """A fleet as it is seen with these rights: what they do not allow is not there, nor is it said to be missing.

    It follows the fleet: what was learned since is seen at the next question.
    """

    def __init__(self, fleet: Fleet, rights: Rights) -> None:
        self.rights = rights
        self._fleet = fleet
        self._version = -1
        self._seen = Catalog(())

    @property
    def cards(self) -> Mapping[str, ModelCard]:
        """Models with a ready replica, by name, a base that may not be used but with an adapter among them."""
        return self._catalog.models

    @property
    def bases(self) -> tuple[str, ...]:
        """Names of models that may be used by themselves."""
        return self._catalog.bases

    @property
    def aliases(self) -> Aliases:
        return self._catalog.aliases

    @property
    def loading(self) -> list[str]:
        """Known models without a ready replica that may have one later."""
        return [name for name in self._fleet.loading if self.rights.touch(name)]

    @property
    def asleep(self) -> list[str]:
        """Models that a first request wakes."""
        return [name for name in self._fleet.asleep if self.rights.touch(name)]

    @property
    def listed(self) -> Catalog:
        """The catalog with sleeping models in it."""
        asleep = self._fleet.asleep
        if not asleep:
            return self._catalog
        return Catalog([*self._fleet.cards.values(), *asleep.values()], self._fleet.aliases, rights=self.rights)

    @property
    def failed(self) -> list[str]:
        """Models that could not be loaded."""
        return [name for name in self._fleet.failed if self.rights.touch(name)]

    def links_for(self, ref: ModelRef) -> list[ReplicaLink]:
        """As `Fleet.links_for`, of a model that was resolved here."""
        return self._fleet.links_for(ref)

    def resolve(
        self,
        wanted: Wanted | str,
        *,
        takes_any: bool = False,
        order: Order = heaviest_first,
        draw: Draw = no_canary,
    ) -> ModelRef:
        """The model meant by a client's words, pinned to the version that is served now.

        Of an alias it is the first target that is ready. One that sleeps counts as ready: the request wakes it.
        takes_any: a name that nobody has means the only model, where there is only one
        order: in which targets of an alias are tried
        draw: as of `Catalog.resolve`
        Raises NotFound, AdapterUnusable, InvalidRequest, or ModelLoading where the base exists but no
        replica of it is ready.
        """
        asked = Wanted(model=wanted) if isinstance(wanted, str) else wanted
        asked = replace(asked, model=self._only_model(asked.model, asked.param))
        error: ServeError | None = None
        for address, found in self._catalog.tried(asked, order, draw):
            if isinstance(found, ModelRef):
                return found
            if isinstance(found, NotFound) and (sleeper := self._missing_base(address, self.asleep)) is not None:
                raise self._fleet.not_ready(sleeper) from None
            error = error or found
        assert error is not None, "a name stands for one address at least"
        if isinstance(error, NotFound):
            absent = [*self.loading, *self.asleep, *self.failed]
            for address in addresses_of(asked.model.strip(), self._fleet.aliases, order) if absent else ():
                if (missing := self._missing_base(address, absent)) is not None:
                    raise self._fleet.not_ready(missing)
            known = {*self.bases, *absent}
            if takes_any and isinstance(error, ModelNotFound) and len(known) == 1:
                return self.resolve(replace(asked, model=known.pop()), draw=draw)
        raise error

    def _only_model(self, name: str, param: str) -> str:
        """Return the only model's name where that is meant, and else the name as it is. Raises ModelNotFound."""
        if name != ONLY_MODEL or name in self._catalog.models or name in self.aliases:
            return name
        bases = sorted({*self.bases, *self.asleep})
        if len(bases) > 1:
            must = f"be one of {', '.join(bases[:MAX_NAMED])}, as several models are served"
            raise ModelNotFound.refusing(param, must=must, found=f'nothing, or "{ONLY_MODEL}"')
        return bases[0] if bases else name

    @property
    def _catalog(self) -> Catalog:
        if self._version != self._fleet.version:
            self._seen = Catalog(self._fleet.cards.values(), self._fleet.aliases, rights=self.rights)
            self._version = self._fleet.version
        return self._seen

    def _missing_base(self, address: str, absent: Iterable[str]) -> str | None:
        """The longest name of those models that this address begins with, if it may be used."""
        matches = [each for each in absent if address == each or address.startswith(f"{each}:")]
        allowed = [each for each in matches if self.rights.allow(each, address[len(each) + 1 :] or None)]
        return max(allowed, key=len, default=None)
