"""Which router answers a request under an `Idempotency-Key`, and what it answered: one book for all routers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from serve_app.core.errors import KeyReused
from serve_app.router.replays import Message, ReplaySettings, size_of

LOST_S = 10.0
"""A router that was not heard of for so long answers nothing any more."""
MAX_TOTAL_BYTES = 256 << 20
"""Of the answers of all tenants together."""


class Standing(Enum):
    """What a router is told that asks for a key: it is to answer, or another one does already."""

    YOURS = "yours"
    RUNNING = "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One request under its key. seconds: for which its answer is good"""

    tenant: str
    key: str
    fingerprint: bytes
    seconds: float


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


@dataclass(slots=True)
class _Entry:
    claim: Claim
    holder: str
    expires_at: float
    answer: tuple[Message, ...] | None = None
    num_bytes: int = 0


class Claims:
    """One writer. Answers are in memory alone: they hold what models wrote, which is kept nowhere.

    clock: seconds, monotonic
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        settings: ReplaySettings | None = None,
        max_total_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        self._clock = clock
        self._settings = settings or ReplaySettings()
        self._max_total_bytes = max_total_bytes
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._heard_at: dict[str, float] = {}

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._entries.values())

    def heard(self, holder: str) -> None:
        """The router lives."""
        now = self._clock()
        self._heard_at = {each: at for each, at in self._heard_at.items() if now - at < LOST_S} | {holder: now}

    def claim(self, claim: Claim, holder: str) -> Claimed:
        """Raises KeyReused where another request came with the key."""
        self.heard(holder)
        found = self._valid(claim)
        if found is None:
            self._entries[claim.tenant, claim.key] = _Entry(claim, holder, self._clock() + claim.seconds)
            self._make_room(claim.tenant)
            return Standing.YOURS
        if found.claim.fingerprint != claim.fingerprint:
            raise KeyReused.refusing(
                "Idempotency-Key", must="be sent with the same request again", found="another body or route"
            )
        if found.answer is not None:
            return found.answer
        return Standing.YOURS if found.holder == holder else Standing.RUNNING

    def deliver(self, claim: Claim, holder: str, answer: Sequence[Message] | None) -> None:
        """What nobody knows of any more, as after a restart, is taken in too."""
        self.heard(holder)
        place = claim.tenant, claim.key
        found = self._valid(claim)
        if found is not None and (found.holder != holder or found.answer is not None):
            return
        if found is not None and found.claim.fingerprint != claim.fingerprint:
            return
        if answer is None:
            self._entries.pop(place, None)
            return
        expires_at = self._clock() + claim.seconds if found is None else found.expires_at
        num_bytes = sum(map(size_of, answer))
        self._entries[place] = _Entry(claim, holder, expires_at, tuple(answer), num_bytes)
        self._make_room(claim.tenant)

    def _valid(self, claim: Claim) -> _Entry | None:
        """What is there under the key and still good."""
        found = self._entries.get((claim.tenant, claim.key))
        if found is None:
            return None
        is_lost = found.answer is None and found.holder not in self._alive()
        if is_lost or (found.answer is not None and found.expires_at <= self._clock()):
            del self._entries[claim.tenant, claim.key]
            return None
        return found

    def _alive(self) -> set[str]:
        return {each for each, at in self._heard_at.items() if self._clock() - at < LOST_S}

    def _make_room(self, tenant: str) -> None:
        """The oldest answers give way: those that are old, then the tenant's own, then anybody's."""
        now, settings = self._clock(), self._settings
        for place, each in list(self._entries.items()):
            if each.answer is not None and each.expires_at <= now:
                del self._entries[place]
        mine = [each for each in self._entries.values() if each.claim.tenant == tenant]
        self._drop(mine, max_answers=settings.max_answers, max_bytes=settings.max_bytes)
        everybodys = list(self._entries.values())
        self._drop(everybodys, max_answers=len(everybodys), max_bytes=self._max_total_bytes)

    def _drop(self, entries: Sequence[_Entry], *, max_answers: int, max_bytes: int) -> None:
        left, num_bytes = len(entries), sum(each.num_bytes for each in entries)
        for each in entries:
            if left <= max_answers and num_bytes <= max_bytes:
                return
            if each.answer is not None:
                left, num_bytes = left - 1, num_bytes - each.num_bytes
                del self._entries[each.claim.tenant, each.claim.key]
