"""Publishes adapters: every ready replica serves a new version before its publisher is answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from serve_app.api.adapters import ListedAdapter, PreviousVersion
from serve_app.api.error_text import shown
from serve_app.catalog.adapters import read_version
from serve_app.catalog.files import CatalogError
from serve_app.catalog.published import PublishedFiles
from serve_app.catalog.resolve import ADAPTER_NAME
from serve_app.catalog.sources import Source as AdapterSource
from serve_app.catalog.sources import is_address, parse_source
from serve_app.core.adapters import AdapterSet, PublishedAdapter
from serve_app.core.backend import Backend
from serve_app.core.cards import AdapterCard, ModelCard, ReplicaCard
from serve_app.core.errors import Forbidden, InvalidRequest, ModelNotFound, ReplicaLost, ServeError, Unavailable
from serve_app.core.tenants import Rights
from serve_app.router.fleet import Fleet
from serve_app.router.link import ReplicaLink
from serve_app.router.patience import begin
from serve_app.router.published_sources import MemorySource, Source
from serve_app.tenants.published import Action, Change, changed

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

HELLO_TIMEOUT_S = 2.0
HEARING_PERIOD_S = 0.05
APPLYING_S = 120.0
HEARING_S = 30.0
"""In which other routers must have heard of a change. Replicas forget a silent router earlier."""
RETRY_S = 30.0
"""After which a replica is told again of what it could not fetch."""
MAX_READING = 2
"""Adapters whose files a router digests at once, and as many that it fetches."""
MAX_PATH_CHARS = 4096
NAME, PATH = "lora_name", "lora_path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """Who publishes. rights: the names that it may publish under;  key_id: "" where no key was asked for"""

    name: str = "operator"
    key_id: str = ""
    rights: Rights = field(default_factory=Rights)


ROLLOUT = Publisher(name="rollout")
"""Decides about canaries."""


class Publishing:
    """Brings what is published to every replica. Discovery tells it of those that come, rest and go, not the fleet.

    A replica that starts joins the fleet when it has applied the set; until then it takes no requests.

    roots: folders and addresses below which adapters may lie, besides the `adapters` folder of their model
    refused: by base and name, why the files in a watched folder are not published
    applying_s: in which every ready replica must have applied a change; else the publisher is told that some have not
    """

    def __init__(
        self,
        fleet: Fleet,
        source: Source | None = None,
        *,
        roots: Sequence[str] = (),
        applying_s: float = APPLYING_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.roots = tuple(roots)
        self.refused: dict[tuple[str, str], str] = {}
        self.fleet = fleet
        self._source = source or MemorySource()
        self._applying_s = applying_s
        self._clock = clock
        self._waiting: dict[str, tuple[ReplicaCard, Backend]] = {}
        self._joined: dict[str, Backend] = {}
        self._models: dict[str, ModelCard] = {}
        self._applying: dict[str, asyncio.Task[None]] = {}
        self._applied_at: dict[str, float] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._reading = asyncio.Semaphore(MAX_READING)
        self._fetching = asyncio.Semaphore(MAX_READING)  # a store may take long, and folders do not wait for it

    # What discovery tells

    def put(self, card: ReplicaCard, backend: Backend) -> None:
        """Take a replica in as soon as it has applied what is published, and refresh its card."""
        model = self._models.get(card.replica_id)
        if model is not None and model.adapters_revision > card.model.adapters_revision:
            card = replace(card, model=model)  # the hello began before the change
        published = self._source.published
        is_behind = published is None or card.model.adapters_revision < published.revision
        if is_behind and card.replica_id not in self._joined:
            self.fleet.hear(card)
            self._waiting[card.replica_id] = card, backend
        else:
            self._join(card, backend)
        if published is None or card.model.adapters_revision > published.revision:
            begin(self._source.look(), self._tasks)
        elif is_behind or self._is_to_try_again(card):
            self._push(card.replica_id, backend, published)

    def _is_to_try_again(self, card: ReplicaCard) -> bool:
        applied_at = self._applied_at.get(card.replica_id, 0.0)
        return self._clock() - applied_at >= RETRY_S and any(each.may_come for each in card.model.adapters)

    def remove(self, replica_id: str) -> None:
        for known in (self._waiting, self._joined, self._models, self._applied_at):
            known.pop(replica_id, None)
        if (task := self._applying.pop(replica_id, None)) is not None:
            task.cancel()
        self.fleet.remove(replica_id)

    def rest(self, model: str, card: ModelCard | None) -> None:
        """Note that a model sleeps, with what is published of it."""
        if card is not None:
            gone, found = self.known.withdrawn_of(model), {each.name: each for each in card.adapters}
            for each in self.known.of(model):
                found[each.name] = AdapterCard(name=each.name, version=each.version, root=each.path)
            card = replace(card, adapters=tuple(each for name, each in sorted(found.items()) if name not in gone))
        self.fleet.rest(model, card)

    def refresh(self) -> None:
        """Bring what was heard of the set to the replicas that are behind. Never waits."""
        if (published := self._source.published) is None:
            return
        for card, backend in tuple(self._waiting.values()):
            if card.model.adapters_revision >= published.revision:
                self._join(card, backend)
            else:
                self._push(card.replica_id, backend, published)
        for link in self.fleet.links_of():
            if link.card.model.adapters_revision < published.revision:
                self._push(link.replica_id, link.backend, published)

    # What publishers ask

    async def publish(
        self,
        name: str,
        path: str,
        by: Publisher,
        *,
        in_place: bool = False,
        canary: float | None = None,
        revision: int | None = None,
    ) -> PublishedAdapter:
        """Let a name mean the adapter in a folder or at an address, on every ready replica of its base.

        name: `base:adapter`, or the adapter's name alone where one base is served
        in_place: whether the name may have meant another version before; then its canary ends, if it has one
        canary: the share of requests for the name that this version is tried with; the name means what it meant
        revision: that the set must still have then, else it is Unavailable; None is any

        Raises ServeError: InvalidRequest for a bad adapter or a name that is taken, Forbidden for a name or folder that
        the publisher may not use, ModelNotFound, Unavailable. Nothing is published then, unless it says so.
        """
        publishing = self._publish(name, path, by, in_place=in_place, canary=canary, revision=revision)
        return await self._shielded(publishing)

    async def withdraw(self, name: str, by: Publisher) -> str:
        """Let a name mean nothing, and return its address. Raises as `publish`, and AdapterNotFound."""
        change = self._change("withdraw", *self._named(name, by), by)
        await self._shielded(self._carry_out(change))
        return change.address

    async def roll_back(self, name: str, by: Publisher) -> PublishedAdapter:
        """End the name's canary; without one, let the name mean the version that it meant before.

        Raises as `publish`, and AdapterNotFound.
        """
        change = self._change("roll back", *self._named(name, by), by)
        return await self._shielded(self._roll_back(change))

    async def decide(self, action: Action, adapter: PublishedAdapter, share: float | None, reason: str) -> None:
        """Widen the share of an adapter's canary, 1 is all; roll it back; or tell that it is held, as nothing changes.

        Another router may have decided before: a canary that has ended stays so, and one that has another share by
        now keeps that. Raises Unavailable, and AdapterNotFound for an adapter that was withdrawn.
        """
        canary = adapter.canary
        assert canary is not None, "a canary is decided about"
        change = self._change(action, adapter.base, adapter.name, ROLLOUT)
        change = replace(change, version=canary.version, share=share, tried=canary.share, reason=reason)
        await self._shielded(self._carry_out(change))

    @property
    def heard(self) -> AdapterSet | None:
        """Return the set as it was heard of last; None before the first time."""
        return self._source.published

    @property
    def known(self) -> AdapterSet:
        """Return what is published, as it was heard of last; nothing if nothing was heard of."""
        return self._source.published or AdapterSet()

    def listed(self) -> list[ListedAdapter]:
        """Return every adapter by address: published ones, and those in models' folders."""
        names = {(each.base, each.name) for each in self.known.adapters}
        names |= {(base, each.name) for base, card in self.fleet.cards.items() for each in card.adapters}
        names |= self.refused.keys()
        return [self.entry(*each) for each in sorted(names)]

    def entry(self, base: str, name: str) -> ListedAdapter:
        """Return one adapter as it is served now."""
        published = self.known.find(base, name)
        card = self.fleet.cards[base].adapter(name) if base in self.fleet.cards else None
        version, path = (card.version, card.root) if card is not None else ("", "")
        if published is not None:
            version, path = published.version, published.path
        links = self.fleet.links_of(base)
        found = [link.card.model.adapter(name) for link in links]
        cards = [each for each in found if each is not None and each.version == version]
        previous = None if published is None else published.previous
        return ListedAdapter(
            id=f"{base}:{name}",
            base=base,
            name=name,
            version=version,
            path=path,
            previous=None if previous is None else PreviousVersion(version=previous[0], path=previous[1]),
            published_at=None if published is None else published.published_at,
            by=None if published is None else published.by,
            replicas=sum(each.is_usable for each in cards),
            ready_replicas=len(links),
            reason=next((each.reason for each in cards if each.reason is not None), None),
            refused=self.refused.get((base, name)),
        )

    async def _publish(
        self, name: str, path: str, by: Publisher, *, in_place: bool, canary: float | None, revision: int | None
    ) -> PublishedAdapter:
        """1. check name and place; 2. fetch, digest; 3. stage on every ready replica; 4. keep; 5. apply everywhere."""
        base, adapter = self._named(name, by)
        if not ADAPTER_NAME.fullmatch(adapter):
            must = f"be base:adapter, the adapter's name matching {ADAPTER_NAME.pattern}"
            raise InvalidRequest.refusing(NAME, must=must, found=shown(name))
        links = self.fleet.links_of(base)
        if not links:
            raise self.fleet.not_ready(base)
        change = self._change("publish", base, adapter, by)
        change = replace(change, in_place=in_place, share=canary, revision=revision)
        with closing(PublishedFiles()) as files:  # what was fetched stays until replicas have it
            if is_address(path):
                change = replace(change, path=str(self._address(path, by)))
                read = partial(files.fetch, change.path)
            else:
                folder, root = self._folder(path, links, by)
                change = replace(change, path=str(folder))
                read = partial(_version, folder, root)
            changed(self._heard(), change)  # refuses early what will be refused
            async with self._fetching if is_address(path) else self._reading:
                version = await asyncio.to_thread(read)
            await self._stage(base, adapter, change.path, version)
        return _found(await self._carry_out(replace(change, version=version)), change)

    async def _roll_back(self, change: Change) -> PublishedAdapter:
        before = _found(changed(self._heard(), change), change)  # refuses early
        current = self.known.find(before.base, before.name)
        if current is None or current.version != before.version:
            await self._stage(before.base, before.name, before.path, before.version)
        return _found(await self._carry_out(change), change)

    def _named(self, name: str, by: Publisher) -> tuple[str, str]:
        """Return base and adapter of an address. Raises ModelNotFound, InvalidRequest, Forbidden."""
        published = self.known
        served = {*self.fleet.cards, *self.fleet.loading, *self.fleet.failed}
        bases = served | {each.base for each in published.adapters}
        base = max((each for each in bases if name.startswith(f"{each}:")), key=len, default=None)
        if base is None and ":" not in name and len(served) == 1:
            [base] = served
            name = f"{base}:{name}"
        wanted, _, adapter = name.rpartition(":") if base is None else (base, ":", name[len(base) + 1 :])
        if not by.rights.allow(wanted, adapter):  # first: nobody learns by it which bases are served
            must = "be a name that the key's tenant may publish under (`publishes` of the tenant)"
            raise Forbidden.refusing(NAME, must=must, found=shown(name))
        if base is None or not adapter:
            must = "be base:adapter, of a base model that is served"
            raise ModelNotFound.refusing(NAME, must=must, found=shown(name))
        return base, adapter

    def _address(self, path: str, by: Publisher) -> AdapterSource:
        """Return the address that is meant. Raises InvalidRequest for a malformed one, Forbidden for any not listed."""
        try:
            source = parse_source(path)
        except CatalogError as error:  # the address itself may have a secret
            raise InvalidRequest.refusing(
                PATH, must="be a folder or a plain address", found=f"another: {error}"
            ) from None
        roots = sorted(filter(is_address, self.roots))
        if not any(parse_source(root).covers(source) for root in roots):
            must = "lie below an address in `adapter_roots` of the router"
            allowed = f"Allowed are {', '.join(roots) or 'none yet'}." if by.rights.allow_everything else ""
            raise Forbidden.refusing(PATH, must=must, found=str(source), remedy=allowed)
        return source

    def _folder(self, path: str, links: Sequence[ReplicaLink], by: Publisher) -> tuple[Path, Path]:
        """Return the folder that is meant, without links, and the root that it is below.

        Raises Forbidden alike for what is not there and for what is elsewhere: nobody learns of other files, and only
        the operator of the roots.
        """
        roots = {
            *(each for each in self.roots if not is_address(each)),
            *(link.card.model.adapters_root for link in links),
        } - {""}
        refusal = Forbidden.refusing(
            PATH,
            must="be a folder below `adapters` of the model or `adapter_roots` of the router",
            found=shown(path),
            remedy=f"Allowed are {', '.join(sorted(roots)) or 'none yet'}." if by.rights.allow_everything else "",
        )
        if len(path) > MAX_PATH_CHARS or "\0" in path or ".." in Path(path).parts or not path.isprintable():
            raise refusal
        try:
            folder = Path(path).resolve()
            for root in sorted(roots, key=len, reverse=True):
                place = Path(root).resolve()
                if folder != place and folder.is_relative_to(place) and folder.is_dir():
                    return folder, place
        except (OSError, RuntimeError):  # a loop of links
            raise refusal from None
        raise refusal

    def _change(self, action: Action, base: str, name: str, by: Publisher) -> Change:
        card = self.fleet.cards[base].adapter(name) if base in self.fleet.cards else None
        revisions = [link.card.model.adapters_revision for link in self.fleet.links_of()]
        return Change(
            action=action,
            base=base,
            name=name,
            served=None if card is None else (card.version, card.root),
            by=by.name,
            actor=by.key_id,
            at=self._clock(),
            seen=max(revisions, default=0),
        )

    def _heard(self) -> AdapterSet:
        if (published := self._source.published) is None:
            raise Unavailable("It is not known yet what is published; retry.", None, {"retry_after_s": 2})
        return published

    async def _stage(self, base: str, name: str, path: str, version: str) -> None:
        """Have every ready replica read and try an adapter. Raises the refusal of any."""
        links = self.fleet.links_of(base)
        calls = (link.backend.stage_adapter(name, path, version) for link in links)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refusals = [each for each in answers if isinstance(each, ServeError) and not isinstance(each, ReplicaLost)]
        if refusals:
            raise min(refusals, key=lambda refusal: refusal.status)
        if all(isinstance(each, BaseException) for each in answers):
            raise self.fleet.not_ready(base)

    async def _carry_out(self, change: Change) -> AdapterSet:
        """Keep a change, and wait until every ready replica has applied it and every router has heard of it."""
        after = await self._source.change_adapters(change)
        found = after.find(change.base, change.name)
        version = (change.version or ("" if found is None else found.version))[:12]
        logger.info("%s %s %s by %s: %s", change.action, change.address, version, change.by, change.reason or "asked")
        self.refresh()
        try:
            async with asyncio.timeout(self._applying_s):
                while behind := self._behind(change.base, after.revision):
                    await asyncio.wait([self._push(link.replica_id, link.backend, after) for link in behind])
        except TimeoutError:
            facts = {"retry_after_s": 5}
            seconds = f"{self._applying_s:g} s"
            message = f"{change.address} is changed, but some replicas have not applied it within {seconds} yet."
            raise Unavailable(message, None, facts) from None
        await self._until_heard(change.base)
        return after

    def _behind(self, base: str, revision: int) -> list[ReplicaLink]:
        return [link for link in self.fleet.links_of(base) if link.card.model.adapters_revision < revision]

    async def _until_heard(self, base: str) -> None:
        """Wait until no replica knows a router that was not told of its revision."""
        try:
            async with asyncio.timeout(HEARING_S):
                while True:
                    if not any(await asyncio.gather(*map(self._num_behind, self.fleet.links_of(base)))):
                        return
                    await asyncio.sleep(HEARING_PERIOD_S)
        except TimeoutError:
            logger.warning("another router has not heard of a change of adapters within %g s", HEARING_S)

    async def _num_behind(self, link: ReplicaLink) -> int:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                return (await link.backend.hello(self.fleet.router_id)).num_routers_behind
        except Exception as error:
            logger.debug("replica %s did not answer: %r", link.replica_id, error)
            return 0  # it is gone, or discovery finds out

    def _push(self, replica_id: str, backend: Backend, published: AdapterSet) -> asyncio.Task[None]:
        """Have a replica apply the set, unless it does already; the task never fails."""
        if (task := self._applying.get(replica_id)) is None:
            task = begin(self._apply(replica_id, backend, published), self._tasks)
            self._applying[replica_id] = task
        return task

    async def _apply(self, replica_id: str, backend: Backend, published: AdapterSet) -> None:
        try:
            model = await backend.apply_adapters(published)
        except Exception as error:
            logger.warning("replica %s could not be told what is published: %s", replica_id, error)
            await asyncio.sleep(HEARING_PERIOD_S)
            return
        finally:
            self._applying.pop(replica_id, None)
            self._applied_at[replica_id] = self._clock()
        self._models[replica_id] = model
        waiting = self._waiting.get(replica_id)
        if waiting is None:
            self.fleet.update(replica_id, model)
        else:
            self._waiting[replica_id] = replace(waiting[0], model=model), backend
            self.refresh()  # something else may have been published meanwhile

    def _join(self, card: ReplicaCard, backend: Backend) -> None:
        self._waiting.pop(card.replica_id, None)
        self._joined[card.replica_id] = backend
        self.fleet.put(card, backend)

    async def _shielded(self, work: Coroutine[object, object, Result]) -> Result:
        """Go on where the publisher leaves."""
        return await asyncio.shield(begin(work, self._tasks))


def _version(folder: Path, root: Path) -> str:
    """Return the digest of an adapter's files. Raises InvalidRequest for what is none."""
    try:
        return read_version(folder, root=root)
    except (CatalogError, OSError) as error:
        reason = error if isinstance(error, CatalogError) else f"its files cannot be read ({error.strerror})"
        must = "be the folder of an adapter as PEFT saves it"
        raise InvalidRequest.refusing(PATH, must=must, found=f"one that is refused: {reason}") from None


def _found(published: AdapterSet, change: Change) -> PublishedAdapter:
    found = published.find(change.base, change.name)
    assert found is not None
    return found
