"""Which router answers a request under an `Idempotency-Key`, and what it answered: one book for all routers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from serve_app.core.errors import KeyReused
from serve_app.router.replays import Message, ReplaySettings, size_of

LOST_S = 10.0
"""What its router did not say for so long that it still answers, it answers no more, be it gone or its word lost."""
MAX_TOTAL_BYTES = 256 << 20
"""Of the answers of all tenants together."""


class Standing(Enum):
    """What a router is told that asks for a key: it is to answer, or another one does already."""

    YOURS = "yours"
    RUNNING = "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One request under its key.

    attempt: which one, of those that come again under the key
    seconds: for which its answer is good
    """

    tenant: str
    key: str
    fingerprint: bytes
    attempt: str
    seconds: float


Place = tuple[str, str]
"""A tenant and its key."""
Attempts = Iterable[tuple[Claim, bool]]
"""Which are still being answered; of each, whether the book said that it was the router's to answer."""
Claimed = Standing | tuple[Message, ...]
"""A standing, or the answer that was given."""


class ClaimBook(Protocol):
    """The book as a router reaches it."""

    async def claim(self, claim: Claim) -> Claimed:
        """Raises KeyReused, and Unavailable where the book cannot be reached."""
        ...

    async def deliver(self, claim: Claim, answer: Sequence[Message] | None) -> None:
        """The answer to what was claimed; None where it is not to be kept. Raises Unavailable."""
        ...

    def leave(self, claim: Claim) -> None:
        """Nothing more is done for it, whether its answer was delivered or not; until then it is still answered."""
        ...


@dataclass(slots=True)
class _Running:
    claim: Claim
    holder: str
    expires_at: float
    lost_at: float


@dataclass(frozen=True, slots=True)
class _Answer:
    claim: Claim
    expires_at: float
    messages: tuple[Message, ...]
    num_bytes: int


@dataclass(slots=True)
class _Shelf:
    """Places of answers, the oldest first, and what those take."""

    answers: OrderedDict[Place, _Answer] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    @property
    def oldest(self) -> _Answer:
        return next(iter(self.answers.values()))

    def put(self, place: Place, answer: _Answer) -> None:
        self.answers[place] = answer
        self.num_bytes += answer.num_bytes

    def take(self, place: Place) -> None:
        self.num_bytes -= self.answers.pop(place).num_bytes


class Claims:
    """One writer. Answers are in memory alone: they hold what models wrote, which is kept nowhere.

    A request holds its key for as long as its router says again and again that it is still answered, however long that
    takes; that it was heard of says nothing, as a claim may come after the word that it is over, or that word never.

    A book that was begun anew learns from the routers what they answer; until each can have told it, nobody is given
    what it does not know.

    What a call costs does not grow with what is kept.

    clock:    seconds, monotonic
    learns_s: for how long it may be that a router has not told what it answers already
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        settings: ReplaySettings | None = None,
        max_total_bytes: int = MAX_TOTAL_BYTES,
        learns_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._learned_at = clock() + learns_s if learns_s else -math.inf
        self._settings = settings or ReplaySettings()
        self._max_total_bytes = max_total_bytes
        self._running: OrderedDict[Place, _Running] = OrderedDict()  # those last heard of are last
        self._everybodys = _Shelf()
        self._shelves: dict[str, _Shelf] = {}

    @property
    def num_bytes(self) -> int:
        return self._everybodys.num_bytes

    def heard(self, holder: str, attempts: Attempts = ()) -> None:
        """The router still answers these. What nobody answers any more is anybody's."""
        now = self._clock()
        self._forget_lost()
        for claim, is_given in attempts:
            place = claim.tenant, claim.key
            running = self._running.get(place)
            if running is None and is_given and self._answer(place) is None:
                running = self._running[place] = _Running(claim, holder, now + claim.seconds, now + LOST_S)
            if running is not None and _is_of(running, claim, holder):
                running.lost_at = now + LOST_S
                self._running.move_to_end(place)

    def claim(self, claim: Claim, holder: str) -> Claimed:
        """Raises KeyReused where another request came with the key."""
        self._forget_lost()
        place, now = (claim.tenant, claim.key), self._clock()
        found = self._answer(place) or self._running.get(place)
        if found is not None and found.claim.fingerprint != claim.fingerprint:
            raise KeyReused.refusing(
                "Idempotency-Key", must="be sent with the same request again", found="another body or route"
            )
        if isinstance(found, _Answer):
            return found.messages
        if (now < self._learned_at) if found is None else found.holder != holder:
            return Standing.RUNNING
        expires_at = now + claim.seconds if found is None else found.expires_at
        self._running[place] = _Running(claim, holder, expires_at, now + LOST_S)
        self._running.move_to_end(place)
        return Standing.YOURS

    def deliver(self, claim: Claim, holder: str, answer: Sequence[Message] | None) -> None:
        """What nobody knows of any more, as after a restart, is taken in too; what another attempt answers is not."""
        self._forget_lost()
        place = claim.tenant, claim.key
        running = self._running.get(place)
        if self._answer(place) is not None or (running is not None and not _is_of(running, claim, holder)):
            return
        self._running.pop(place, None)
        if answer is None:
            return
        expires_at = self._clock() + claim.seconds if running is None else running.expires_at
        kept = _Answer(claim, expires_at, tuple(answer), sum(map(size_of, answer)))
        for shelf in (self._everybodys, self._shelves.setdefault(claim.tenant, _Shelf())):
            shelf.put(place, kept)
        self._make_room(claim.tenant)

    def _forget_lost(self) -> None:
        now = self._clock()
        while self._running and next(iter(self._running.values())).lost_at <= now:
            self._running.popitem(last=False)

    def _answer(self, place: Place) -> _Answer | None:
        """What is there under the key and still good."""
        found = self._everybodys.answers.get(place)
        if found is None or found.expires_at > self._clock():
            return found
        self._drop(found)
        return None

    def _make_room(self, tenant: str) -> None:
        """The oldest answers give way: those that are old, then the tenant's own, then anybody's."""
        now, all_, mine = self._clock(), self._everybodys, self._shelves[tenant]
        while all_.answers and all_.oldest.expires_at <= now:
            self._drop(all_.oldest)
        while len(mine.answers) > self._settings.max_answers or mine.num_bytes > self._settings.max_bytes:
            self._drop(mine.oldest)
        while all_.num_bytes > self._max_total_bytes:
            self._drop(all_.oldest)

    def _drop(self, answer: _Answer) -> None:
        tenant, place = answer.claim.tenant, (answer.claim.tenant, answer.claim.key)
        self._everybodys.take(place)
        self._shelves[tenant].take(place)
        if not self._shelves[tenant].answers:
            del self._shelves[tenant]


def _is_of(running: _Running, claim: Claim, holder: str) -> bool:
    return (running.holder, running.claim.attempt) == (holder, claim.attempt)
