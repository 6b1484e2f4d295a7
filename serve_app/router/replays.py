"""Answers that were given under an `Idempotency-Key`, kept so that a repeat gets the same bytes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from serve_app.api.error_text import shown
from serve_app.core.errors import InvalidRequest, KeyReused, QuotaExceeded

MAX_KEY_CHARS = 255
"""Stripe's bound (https://docs.stripe.com/api/idempotent_requests)."""
MAX_TOTAL_BYTES = 256 << 20
"""Of the answers of all tenants together, the oldest of which give way."""
MESSAGE_BYTES = 400
"""What a message takes besides its bytes, about."""

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """seconds: for which an answer is kept; 0 ignores the keys
    max_answers, max_bytes: kept of one tenant; the oldest give way
    """

    seconds: float = 3600.0
    max_answers: int = 1000
    max_bytes: int = 16 << 20


class Recording:
    """One answer, message by message as ASGI has them, as it comes. Everybody who asked for it follows it.

    fingerprint: of the request that it answers
    is_repeat:   another router has given it before
    """

    def __init__(self, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        self.is_repeat = False
        self.num_bytes = 0
        self.is_over = False
        self._error: Exception | None = None
        self._messages: list[Message] = []
        self._news = asyncio.Event()

    def add(self, message: Message) -> None:
        self._messages.append(message)
        self.num_bytes += size_of(message)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """Nothing follows. error: is raised for whoever follows, where nothing was said"""
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
        """From the first on, to the last of the body, or until it is over without one. Raises what it ended by."""
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


@dataclass(slots=True)
class _Kept:
    recording: Recording
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswer:
    """seconds: for which it is still good"""

    tenant: str
    key: str
    fingerprint: bytes
    messages: tuple[Message, ...]
    seconds: float


class Replays:
    """By tenant and key. What is still being answered is never given up for what is new.

    clock: seconds, monotonic
    """

    def __init__(
        self,
        settings: ReplaySettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_total_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        self.settings = settings or ReplaySettings()
        self.total_bytes = 0  # of answers that are over
        self._clock = clock
        self._max_total_bytes = max_total_bytes
        self._kept: dict[str, OrderedDict[str, _Kept]] = {}
        self._over: OrderedDict[tuple[str, str], int] = OrderedDict()  # bytes by tenant and key, the first over first

    def num_bytes(self, tenant: str) -> int:
        """That are kept of a tenant."""
        return sum(each.recording.num_bytes for each in self._kept.get(tenant, OrderedDict()).values())

    def kept(self) -> list[KeptAnswer]:
        """All answers that are whole and good."""
        now = self._clock()
        return [
            KeptAnswer(
                tenant=tenant,
                key=key,
                fingerprint=each.recording.fingerprint,
                messages=each.recording.so_far,
                seconds=each.expires_at - now,
            )
            for tenant, mine in self._kept.items()
            for key, each in mine.items()
            if each.recording.is_over and each.expires_at > now
        ]

    def find(self, tenant: str, key: str, fingerprint: bytes) -> Recording | None:
        """The answer to the same request, whether it is over or not.

        Raises InvalidRequest for what is no key, KeyReused where another request came with it.
        """
        if not (0 < len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()):
            must = f"be 1 to {MAX_KEY_CHARS} printable characters"
            raise InvalidRequest.refusing("Idempotency-Key", must=must, found=shown(key))
        self._forget_old(tenant)
        kept = self._kept.get(tenant, OrderedDict()).get(key)
        if kept is None:
            return None
        if kept.recording.fingerprint != fingerprint:
            raise KeyReused.refusing(
                "Idempotency-Key", must="be sent with the same request again", found="another body or route"
            )
        return kept.recording

    def begin(self, tenant: str, key: str, fingerprint: bytes) -> Recording:
        """An answer that is now to be given. Raises QuotaExceeded where as many are being given as may be kept."""
        self._make_room(tenant, self.settings.max_answers - 1)
        mine = self._kept.setdefault(tenant, OrderedDict())
        if len(mine) >= self.settings.max_answers:
            raise QuotaExceeded(
                f"As many requests with an Idempotency-Key are being answered as may be ({len(mine)}).",
                None,
                {"retry_after_s": 1},
            )
        recording = Recording(fingerprint)
        mine[key] = _Kept(recording, self._clock() + self.settings.seconds)
        return recording

    def end(
        self, tenant: str, key: str, recording: Recording, *, is_kept: bool, error: Exception | None = None
    ) -> None:
        """It is over; where it is not kept, a repeat is a new request. Whoever follows it has it to the end.

        error: is raised for them, where nothing was said
        """
        recording.end(error)
        self._over[tenant, key] = recording.num_bytes
        self.total_bytes += recording.num_bytes
        if not is_kept:
            self._drop(tenant, key)
        self._make_room(tenant, self.settings.max_answers)
        while self._over and (self.total_bytes > self._max_total_bytes or self._is_old(*next(iter(self._over)))):
            self._drop(*next(iter(self._over)))

    def _make_room(self, tenant: str, max_answers: int) -> None:
        mine = self._kept.get(tenant, OrderedDict())
        num_bytes = sum(each.recording.num_bytes for each in mine.values())
        for key, each in list(mine.items()):
            if len(mine) <= max_answers and num_bytes <= self.settings.max_bytes:
                return
            if each.recording.is_over:
                num_bytes -= each.recording.num_bytes
                self._drop(tenant, key)

    def _is_old(self, tenant: str, key: str) -> bool:
        return self._kept[tenant][key].expires_at <= self._clock()

    def _drop(self, tenant: str, key: str) -> None:
        """One that is over."""
        self.total_bytes -= self._over.pop((tenant, key))
        del self._kept[tenant][key]
        if not self._kept[tenant]:
            del self._kept[tenant]

    def _forget_old(self, tenant: str) -> None:
        mine, now = self._kept.get(tenant, OrderedDict()), self._clock()
        for key, each in list(mine.items()):
            if each.expires_at > now:
                return  # the first are the oldest
            if each.recording.is_over:
                self._drop(tenant, key)


def size_of(message: Message) -> int:
    """Bytes that it takes, about."""
    body = message.get("body", b"")
    return MESSAGE_BYTES + (len(body) if isinstance(body, bytes) else 0)


def fingerprint_of(path: str, dialect: str, body: bytes) -> bytes:
    """The same for the same request."""
    return hashlib.sha256(b"\n".join((path.encode(), dialect.encode("latin-1", "replace"), body))).digest()
