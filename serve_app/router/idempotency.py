"""Answers under an `Idempotency-Key`: computed once, whichever routers are asked; a repeat gets the same bytes."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from serve_app.api.error_text import shown
from serve_app.core.errors import InvalidRequest, KeyReused, QuotaExceeded

MAX_KEY_CHARS = 255
"""Stripe's bound (https://docs.stripe.com/api/idempotent_requests)."""
MAX_TOTAL_BYTES = 256 << 20
"""Of the answers of all tenants together."""
MESSAGE_BYTES = 400
"""What a message takes besides its bytes, about."""
LOST_S = 10.0
"""If a router has not said for so long that it still answers a request, another router may answer it."""

Message = Mapping[str, object]
"""One message of an answer, as ASGI has it."""
Place = tuple[str, str]
"""A tenant and its key."""
Clock = Callable[[], float]
"""Seconds, monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """seconds: for which an answer is kept; 0 ignores the keys
    max_answers, max_bytes: kept of one tenant; the oldest give way
    """

    seconds: float = 3600.0
    max_answers: int = 1000
    max_bytes: int = 16 << 20


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

    @property
    def place(self) -> Place:
        return self.tenant, self.key

    def check(self, other: Claim) -> None:
        """Raise KeyReused where another request came with the key."""
        if other.fingerprint != self.fingerprint:
            must, found = "be sent with the same request again", "another body or route"
            raise KeyReused.refusing("Idempotency-Key", must=must, found=found)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, and until when it is good."""

    claim: Claim
    expires_at: float
    messages: tuple[Message, ...]
    num_bytes: int


class Answers:
    """Whole answers by tenant and key, in memory alone: they hold what models wrote.

    Where there are too many, some give way: 1. those that are old; 2. the tenant's own oldest; 3. anybody's oldest.
    What a call costs does not grow with what is kept.
    """

    def __init__(self, clock: Clock, max_total_bytes: int) -> None:
        self._clock = clock
        self._max_total_bytes = max_total_bytes
        self._all: OrderedDict[Place, Answer] = OrderedDict()  # the oldest first, as in what follows
        self._by_tenant: dict[str, OrderedDict[Place, Answer]] = {}
        self._bytes: Counter[str] = Counter()
        self.num_bytes = 0

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._all.values())

    def find(self, place: Place) -> Answer | None:
        """Return what is there under the key and still good."""
        found = self._all.get(place)
        if found is None or found.expires_at > self._clock():
            return found
        self._drop(found)
        return None

    def put(self, claim: Claim, messages: Sequence[Message], expires_at: float) -> None:
        answer = Answer(claim, expires_at, tuple(messages), sum(map(size_of, messages)))
        self._all[claim.place] = self._by_tenant.setdefault(claim.tenant, OrderedDict())[claim.place] = answer
        self._bytes[claim.tenant] += answer.num_bytes
        self.num_bytes += answer.num_bytes

    def make_room(self, tenant: str, *, max_answers: int, max_bytes: int) -> None:
        """Forget what is too much. max_answers, max_bytes: what may stay of the tenant"""
        now = self._clock()
        while self._all and (oldest := next(iter(self._all.values()))).expires_at <= now:
            self._drop(oldest)
        while (own := self._by_tenant.get(tenant)) and (len(own) > max_answers or self._bytes[tenant] > max_bytes):
            self._drop(next(iter(own.values())))
        while self.num_bytes > self._max_total_bytes:
            self._drop(next(iter(self._all.values())))

    def _drop(self, answer: Answer) -> None:
        tenant, place = answer.claim.tenant, answer.claim.place
        del self._all[place], self._by_tenant[tenant][place]
        self._bytes[tenant] -= answer.num_bytes
        self.num_bytes -= answer.num_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant], self._bytes[tenant]


class Recording:
    """One answer, message by message, as it comes. Everybody who asked for it follows it.

    is_repeat: another router has given it before
    """

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self.is_repeat = False
        self.is_over = False
        self.num_bytes = 0
        self._error: Exception | None = None
        self._messages: list[Message] = []
        self._news = asyncio.Event()
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        self._messages.append(message)
        self.num_bytes += size_of(message)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """Say that nothing follows. error: is raised for whoever follows, where nothing was said"""
        self._error = error
        self.is_over = True
        self._wake()

    @property
    def so_far(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    async def over(self) -> None:
        """Wait until nothing follows any more."""
        while not self.is_over:
            await self._news.wait()

    async def messages(self) -> AsyncIterator[Message]:
        """Yield from the first message to the last of the body, or until it is over without one.

        Raises what it ended by, where nothing was said.
        """
        place = 0
        while True:
            while place < len(self._messages):
                message = self._messages[place]
                yield message
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    return
                place += 1
            if self.is_over and self._error is not None and not place:
                raise self._error
            if self.is_over:
                return
            await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Replays:
    """The answers of one router: those that are being given, which are never given up for new ones, and whole ones."""

    def __init__(
        self,
        settings: ReplaySettings | None = None,
        *,
        clock: Clock = time.monotonic,
        max_total_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        self.settings = settings or ReplaySettings()
        self._clock = clock
        self._kept = Answers(clock, max_total_bytes)
        self._running: dict[Place, tuple[Claim, Recording, float]] = {}  # the last: when it is no longer good

    def kept(self) -> list[tuple[Answer, float]]:
        """Return all answers that are whole and good; of each, for how many seconds it still is."""
        now = self._clock()
        return [(each, each.expires_at - now) for each in self._kept if each.expires_at > now]

    def find(self, claim: Claim) -> Recording | None:
        """Return the answer to the same request, whether it is over or not.

        Raises InvalidRequest for what is no key, KeyReused where another request came with it.
        """
        if not (0 < len(claim.key) <= MAX_KEY_CHARS and claim.key.isascii() and claim.key.isprintable()):
            must = f"be 1 to {MAX_KEY_CHARS} printable characters"
            raise InvalidRequest.refusing("Idempotency-Key", must=must, found=shown(claim.key))
        if (running := self._running.get(claim.place)) is not None:
            running[0].check(claim)
            return running[1]
        if (kept := self._kept.find(claim.place)) is None:
            return None
        kept.claim.check(claim)
        recording = Recording(kept.messages)
        recording.end()
        return recording

    def begin(self, claim: Claim) -> Recording:
        """Begin an answer. Raises QuotaExceeded where as many are being given as may be kept."""
        num_running = len(self._running_of(claim.tenant))
        if num_running >= self.settings.max_answers:
            raise QuotaExceeded(
                f"As many requests with an Idempotency-Key are being answered as may be ({num_running}).",
                None,
                {"retry_after_s": 1},
            )
        recording = Recording()
        self._running[claim.place] = claim, recording, self._clock() + claim.seconds
        self._make_room(claim.tenant)
        return recording

    def end(self, claim: Claim, *, is_kept: bool, error: Exception | None = None) -> None:
        """End an answer; where it is not kept, a repeat is a new request. Whoever follows it has it to the end.

        error: is raised for them, where nothing was said
        """
        begun, recording, expires_at = self._running.pop(claim.place)
        recording.end(error)
        if is_kept:
            self._kept.put(begun, recording.so_far, expires_at)
        self._make_room(claim.tenant)

    def _running_of(self, tenant: str) -> list[Recording]:
        return [recording for claim, recording, _ in self._running.values() if claim.tenant == tenant]

    def _make_room(self, tenant: str) -> None:
        """Forget what is too much of a tenant. Answers that are being given count, too."""
        running, settings = self._running_of(tenant), self.settings
        max_bytes = settings.max_bytes - sum(each.num_bytes for each in running)
        self._kept.make_room(tenant, max_answers=settings.max_answers - len(running), max_bytes=max_bytes)


class Standing(Enum):
    """What a router is told that asks for a key: it is to answer, or another one does already."""

    YOURS = "yours"
    RUNNING = "running"


Attempts = Iterable[tuple[Claim, bool]]
"""Which are still being answered; of each, whether the book said that it was the router's to answer."""
Claimed = Standing | tuple[Message, ...]
"""A standing, or the answer that was given."""


@dataclass(slots=True)
class _Running:
    claim: Claim
    holder: str
    expires_at: float
    lost_at: float

    def is_of(self, claim: Claim, holder: str) -> bool:
        return (self.holder, self.claim.attempt) == (holder, claim.attempt)


class Claims:
    """The one book of all routers: which of them answers a request, and what was answered. It has one writer.

    A request holds its key for as long as its router says again and again that it is still answered. That the router
    lives says nothing: a claim may come after the word that it is over, or that word never.

    A book that was begun anew learns from the routers what they answer. Until each can have told it, nobody is given
    what the book does not know.

    learns_s: for how long it may be that a router has not told what it answers already
    """

    def __init__(
        self,
        *,
        clock: Clock,
        settings: ReplaySettings | None = None,
        max_total_bytes: int = MAX_TOTAL_BYTES,
        learns_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._learned_at = clock() + learns_s if learns_s else -math.inf
        self._settings = settings or ReplaySettings()
        self._running: OrderedDict[Place, _Running] = OrderedDict()  # those last heard of are last
        self._kept = Answers(clock, max_total_bytes)

    def heard(self, holder: str, attempts: Attempts = ()) -> None:
        """Note that the router still answers these. What nobody answers any more is anybody's."""
        now = self._clock()
        self._forget_lost()
        for claim, is_given in attempts:
            running = self._running.get(claim.place)
            if running is None and is_given and self._kept.find(claim.place) is None:
                running = self._running[claim.place] = _Running(claim, holder, now + claim.seconds, now + LOST_S)
            if running is not None and running.is_of(claim, holder):
                running.lost_at = now + LOST_S
                self._running.move_to_end(claim.place)

    def claim(self, claim: Claim, holder: str) -> Claimed:
        """Raises KeyReused where another request came with the key."""
        self._forget_lost()
        now = self._clock()
        if (kept := self._kept.find(claim.place)) is not None:
            kept.claim.check(claim)
            return kept.messages
        if (running := self._running.get(claim.place)) is not None:
            running.claim.check(claim)
        if (now < self._learned_at) if running is None else running.holder != holder:
            return Standing.RUNNING
        expires_at = now + claim.seconds if running is None else running.expires_at
        self._running[claim.place] = _Running(claim, holder, expires_at, now + LOST_S)
        self._running.move_to_end(claim.place)
        return Standing.YOURS

    def deliver(self, claim: Claim, holder: str, answer: Sequence[Message] | None) -> None:
        """Keep an answer, also of what nobody knows of, as after a restart; not what another attempt answers."""
        self._forget_lost()
        running = self._running.get(claim.place)
        if self._kept.find(claim.place) is not None or (running is not None and not running.is_of(claim, holder)):
            return
        self._running.pop(claim.place, None)
        if answer is None:
            return
        self._kept.put(claim, answer, self._clock() + claim.seconds if running is None else running.expires_at)
        settings = self._settings
        self._kept.make_room(claim.tenant, max_answers=settings.max_answers, max_bytes=settings.max_bytes)

    def _forget_lost(self) -> None:
        now = self._clock()
        while self._running and next(iter(self._running.values())).lost_at <= now:
            self._running.popitem(last=False)


def size_of(message: Message) -> int:
    """Return about how many bytes a message takes."""
    body = message.get("body", b"")
    return MESSAGE_BYTES + (len(body) if isinstance(body, bytes) else 0)


def fingerprint_of(path: str, dialect: str, body: bytes) -> bytes:
    """Return the same for the same request."""
    return hashlib.sha256(b"\n".join((path.encode(), dialect.encode("latin-1", "replace"), body))).digest()
