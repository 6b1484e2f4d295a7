"""Streams that a replica keeps for clients that lost their connection, or their router: what was asked and told."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from serve_app.core.cards import KeptCard
from serve_app.core.delta import Delta
from serve_app.core.progress import Past, Progress
from serve_app.core.request import GenerationRequest, Kept
from serve_app.replica.delivery import DELTA_BYTES, ID_BYTES, size_of

CLAIM_S = 3.0
"""For so long after it was fetched a stream is given to nobody else: until then it is computed somewhere again."""

Place = tuple[str, int]
"""The id of a response, and the number of a prompt of it."""


@dataclass(slots=True, kw_only=True)
class _Stream:
    """One prompt of a client's stream.

    request: as it was asked for, without what was told of it before
    num_running: its completions that have not ended
    ends_at: once nothing more of it is computed; seconds, by the clock of who keeps it
    is_counted: among all bytes; one that may still be refused is not
    claim, claimed_until: who fetched it last, and until when it is nobody else's
    """

    request: GenerationRequest
    kept: Kept
    progress: Progress
    num_running: int
    num_bytes: int
    is_counted: bool = False
    ends_at: float = 0.0
    claim: str = ""
    claimed_until: float = 0.0

    @property
    def flow(self) -> str:
        return self.request.share.flow

    @property
    def place(self) -> Place:
        return self.kept.response_id, self.request.part


class Keeping:
    """Lives on the event loop.

    max_bytes: of all streams. Of those of which nothing more is computed the oldest give way, first those of the flow
               that has most; a flow that has more itself gets no room
    clock:     seconds, monotonic
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._running: dict[str, _Stream] = {}
        self._left: dict[str, OrderedDict[Place, _Stream]] = {}  # by flow, the oldest first
        self._bytes: Counter[str] = Counter()  # by flow
        self._num_bytes = self._num_forgotten = 0

    @property
    def card(self) -> KeptCard:
        num_streams = sum(map(len, self._left.values()))
        return KeptCard(num_streams=num_streams, num_bytes=self._num_bytes, num_forgotten=self._num_forgotten)

    def begin(self, requests: Iterable[GenerationRequest]) -> None:
        """Keep those that are to be kept, from now on. Nothing gives way to them yet, as they may still be refused."""
        for request in requests:
            if request.kept is None:
                continue
            progress = Progress(request)
            for delta in request.past:
                progress.take(delta)
            progress.go_on(request)
            bare = replace(request, continued=(), is_reported=False, past=())
            num_running = len(request.samples)
            self._running[request.request_id] = _Stream(
                request=bare,
                kept=request.kept,
                progress=progress,
                num_running=num_running,
                num_bytes=_size_of(request, request.kept),
            )

    def make_room(self, requests: Sequence[GenerationRequest]) -> bool:
        """Note that these were accepted. Return whether there is room for all of them that are to be kept."""
        for request in requests:
            if (stream := self._running.get(request.request_id)) is not None:
                self._count(stream)
        have_room = [request.kept is None or self._has_room(request.request_id) for request in requests]
        return all(have_room)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests of which nothing is computed, as they were refused."""
        for request_id in request_ids:
            if (stream := self._running.pop(request_id, None)) is not None and stream.is_counted:
                self._grow(stream, -stream.num_bytes)

    def note(self, deltas: Iterable[Delta]) -> None:
        """Remember what a step gave."""
        for delta in deltas:
            stream = self._running.get(delta.request_id)
            if stream is None:
                continue
            if delta.error is None:
                stream.progress.take(delta)
                stream.num_running -= delta.finish is not None
                self._grow(stream, size_of(delta) - DELTA_BYTES)
                if not (stream.progress.is_kept and self._has_room(delta.request_id)):
                    self.forget([delta.request_id])
                    self._num_forgotten += 1
                    continue
            if delta.error is not None or not stream.num_running:
                self.leave([delta.request_id])

    def leave(self, request_ids: Iterable[str]) -> None:
        """Note that nothing more is computed of these: from now on their time runs, and they may have to give way."""
        for request_id in request_ids:
            if (stream := self._running.pop(request_id, None)) is not None:
                self._count(stream)
                stream.ends_at = self._clock() + stream.kept.seconds
                left = self._left.setdefault(stream.flow, OrderedDict())
                if (before := left.get(stream.place)) is not None:
                    self._drop(before)
                self._left.setdefault(stream.flow, left)[stream.place] = stream

    def expire(self) -> None:
        """Forget streams whose time is over."""
        now = self._clock()
        for stream in [each for left in self._left.values() for each in left.values() if each.ends_at <= now]:
            self._drop(stream)

    def find(self, response_id: str, owner: str, claim: str) -> tuple[Past, ...]:
        """Return what is kept of an owner's stream, under either of its ids. claim: as of `Backend.recall`"""
        self.expire()
        streams = chain(self._running.values(), *(left.values() for left in self._left.values()))
        found = [each for each in streams if each.kept.owner == owner]
        return tuple(
            self._claimed(each, claim) for each in found if response_id in (each.kept.id, each.kept.response_id)
        )

    def _claimed(self, stream: _Stream, claim: str) -> Past:
        now = self._clock()
        is_taken = stream.claim != claim and now < stream.claimed_until
        if claim and not is_taken:
            stream.claim, stream.claimed_until = claim, now + CLAIM_S
        return Past(request=stream.request, deltas=stream.progress.past, is_taken=is_taken)

    def _has_room(self, request_id: str) -> bool:
        """Let older streams give way to one that runs. If that is not enough, they all stay, and it is forgotten."""
        if (stream := self._running.get(request_id)) is None:
            return False
        if self._num_bytes <= self._max_bytes:
            return True
        excess, sizes = self._num_bytes - self._max_bytes, Counter(self._bytes)
        left = {flow: iter(each.values()) for flow, each in self._left.items()}
        giving_way = []
        while excess > 0:
            fullest = max(left, key=sizes.__getitem__, default=None)
            if fullest is None or sizes[fullest] < sizes[stream.flow]:
                self.forget([request_id])
                return False
            if (oldest := next(left[fullest], None)) is None:
                del left[fullest]
                continue
            giving_way.append(oldest)
            excess -= oldest.num_bytes
            sizes[fullest] -= oldest.num_bytes
        for each in giving_way:
            self._drop(each)
        self._num_forgotten += len(giving_way)
        return True

    def _count(self, stream: _Stream) -> None:
        if not stream.is_counted:
            num_bytes, stream.num_bytes, stream.is_counted = stream.num_bytes, 0, True
            self._grow(stream, num_bytes)

    def _grow(self, stream: _Stream, num_bytes: int) -> None:
        stream.num_bytes += num_bytes
        self._num_bytes += num_bytes
        self._bytes[stream.flow] += num_bytes
        if not self._bytes[stream.flow]:
            del self._bytes[stream.flow]

    def _drop(self, stream: _Stream) -> None:
        """Forget one of which nothing is computed."""
        left = self._left[stream.flow]
        del left[stream.place]
        if not left:
            del self._left[stream.flow]
        self._grow(stream, -stream.num_bytes)


def _size_of(request: GenerationRequest, kept: Kept) -> int:
    """Return the bytes that a stream takes before more of it is computed, about."""
    of_past = sum([size_of(delta) - DELTA_BYTES for delta in request.past])
    return len(kept.body) // kept.num_parts + _input_size_of(request) + DELTA_BYTES * request.n + of_past


def _input_size_of(request: GenerationRequest) -> int:
    """Return the bytes that a request takes as it was read, beside its body, about."""
    conversation = request.conversation
    images = (*request.prompt.images, *(() if conversation is None else conversation.images))
    num_chars = request.num_chars + (0 if conversation is None else len(conversation.source))
    return num_chars + ID_BYTES * request.prompt.num_ids + sum(len(image.data) for image in images)
