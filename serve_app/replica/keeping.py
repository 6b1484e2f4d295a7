"""Streams that a replica keeps for clients that lost their connection, or their router: what was asked and told."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from serve_app.core.cards import KeptCard
from serve_app.core.delta import Delta
from serve_app.core.progress import Past, Progress
from serve_app.core.request import GenerationRequest
from serve_app.replica.delivery import size_of


@dataclass(slots=True, kw_only=True)
class _Stream:
    """One prompt of a client's stream.

    num_running: its completions that have not ended
    num_bytes, ends_at: once nothing more of it is computed; seconds, by the clock of who keeps it
    """

    request: GenerationRequest
    progress: Progress
    num_running: int
    num_bytes: int = 0
    ends_at: float = 0.0

    @property
    def past(self) -> Past:
        bare = replace(self.request, continued=(), is_reported=False, past=())
        return Past(request=bare, deltas=self.progress.past)


class Keeping:
    """Lives on the event loop.

    max_bytes: of streams of which nothing more is computed; the oldest give way
    clock:     seconds, monotonic
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._running: dict[str, _Stream] = {}
        self._left: OrderedDict[str, _Stream] = OrderedDict()  # the oldest first
        self._num_bytes = self._num_forgotten = 0

    @property
    def card(self) -> KeptCard:
        return KeptCard(num_streams=len(self._left), num_bytes=self._num_bytes, num_forgotten=self._num_forgotten)

    def begin(self, requests: Iterable[GenerationRequest]) -> None:
        """Keep those that are to be kept, from now on."""
        for request in requests:
            if request.kept is None or not self._max_bytes:
                continue
            progress = Progress(request)
            for delta in request.past:
                progress.take(delta)
            progress.go_on(request)
            num_running = len(request.samples)
            self._running[request.request_id] = _Stream(request=request, progress=progress, num_running=num_running)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests of which nothing is computed, as they were refused."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def note(self, deltas: Iterable[Delta]) -> None:
        """Remember what a step gave."""
        for delta in deltas:
            stream = self._running.get(delta.request_id)
            if stream is None:
                continue
            if delta.error is None:
                stream.progress.take(delta)
                stream.num_running -= delta.finish is not None
            if delta.error is not None or not stream.num_running:
                self.leave([delta.request_id])

    def leave(self, request_ids: Iterable[str]) -> None:
        """Note that nothing more is computed of these: from now on their time runs, and they take room."""
        for request_id in request_ids:
            stream = self._running.pop(request_id, None)
            if stream is None or stream.request.kept is None:
                continue
            kept = stream.request.kept
            stream.ends_at = self._clock() + kept.seconds
            stream.num_bytes = len(kept.body) // kept.num_parts + sum(map(size_of, stream.progress.past))
            self._left[request_id] = stream
            self._num_bytes += stream.num_bytes
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._left)))
            self._num_forgotten += 1

    def expire(self) -> None:
        """Forget streams whose time is over."""
        now = self._clock()
        for request_id in [request_id for request_id, each in self._left.items() if each.ends_at <= now]:
            self._drop(request_id)

    def find(self, response_id: str, owner: str) -> tuple[Past, ...]:
        """Return what is kept of an owner's stream, under either of its ids."""
        self.expire()
        streams = (*self._running.values(), *self._left.values())
        return tuple(
            each.past
            for each in streams
            if (kept := each.request.kept) is not None
            and kept.owner == owner
            and response_id in (kept.id, kept.response_id)
        )

    def _drop(self, request_id: str) -> None:
        self._num_bytes -= self._left.pop(request_id).num_bytes
