"""The requests that a replica has accepted: their routers, their unfinished samples, and the room for more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from serve_app.core.delta import Delta
from serve_app.core.errors import Overloaded
from serve_app.core.names import ModelRef
from serve_app.core.request import GenerationRequest

WINDOW = 64
MIN_WAIT_S = 1.0
MAX_WAIT_S = 60.0


class Departures:
    """Predicts from the last endings how long the queue takes to make room."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=WINDOW)

    def note(self) -> None:
        self._times.append(self._clock())

    def wait_s(self, num_sequences: int) -> int:
        """Predict the whole seconds until so many more end, 1 to 60; 1 if too few have ended to tell."""
        if len(self._times) < 2:
            return int(MIN_WAIT_S)
        span_s = self._clock() - self._times[0]
        predicted = span_s / (len(self._times) - 1) * num_sequences
        return round(min(max(predicted, MIN_WAIT_S), MAX_WAIT_S))


@dataclass(slots=True, kw_only=True)
class _OpenRequest:
    router_id: str
    client_request_id: str
    model: ModelRef
    samples: set[int]
    since: float
    has_begun: bool = False
    is_paused: bool = False


class OpenRequests:
    """The open requests by id. A request leaves with its last sample, or when it is dropped.

    Lives on the event loop. Any thread may ask whether a request is open.

    num_places: for sequences, running and waiting together
    clock:      seconds, monotonic
    """

    def __init__(self, num_places: int, clock: Callable[[], float]) -> None:
        self._num_places = num_places
        self._clock = clock
        self._requests: dict[str, _OpenRequest] = {}
        self._departures = Departures(clock)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that have not ended."""
        return sum(len(request.samples) for request in self._requests.values())

    @property
    def versions(self) -> frozenset[str]:
        """Return the adapter versions that are in use."""
        return frozenset(part.version for request in self._requests.values() for part in request.model.parts)

    def wait_s(self, num_slots: int) -> float:
        """Return since when the oldest request waits for its first token, or until all queued sequences have begun.

        num_slots: of sequences that are computed together; the longer of the two is returned, in seconds
        """
        now, num_queued = self._clock(), self.num_sequences - num_slots
        oldest = next((each.since for each in self._requests.values() if not each.has_begun), now)
        return max(now - oldest, self._departures.wait_s(num_queued) if num_queued > 0 else 0.0)

    def check_room(self, requests: Items[GenerationRequest]) -> None:
        """Raise Overloaded if these requests do not fit, with the seconds until they should."""
        num_wanted = sum(len(request.samples) for request in requests)
        num_missing = num_wanted + self.num_sequences - self._num_places
        if num_missing > 0:
            raise Overloaded(
                f"{num_wanted} more completions do not fit the queue of {self._num_places}.",
                None,
                {"retry_after_s": self._departures.wait_s(num_missing)},
            )

    def add(self, router_id: str, requests: Items[GenerationRequest]) -> None:
        for request in requests:
            self._requests[request.request_id] = _OpenRequest(
                router_id=router_id,
                client_request_id=request.client_request_id,
                model=request.model,
                samples=set(request.samples),
                since=self._clock(),
            )

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests; ignore unknown ids."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def clear(self) -> None:
        self._requests.clear()

    def owned_by(self, router_id: str) -> frozenset[str]:
        """Return the ids of a router's requests."""
        return frozenset(id_ for id_, request in self._requests.items() if request.router_id == router_id)

    def names_of(self, router_id: str) -> list[str]:
        """Return the client's ids of a router's requests, the oldest first."""
        return [each.client_request_id for each in self._requests.values() if each.router_id == router_id]

    def among(self, request_ids: Iterable[str], router_id: str) -> frozenset[str]:
        """Return which of these requests are open and belong to the router."""
        found = ((id_, self._requests.get(id_)) for id_ in request_ids)
        return frozenset(id_ for id_, request in found if request is not None and request.router_id == router_id)

    def samples_of(self, request_ids: Iterable[str]) -> set[tuple[str, int]]:
        """Return the request and sample of every unfinished sequence of these requests."""
        return {(id_, sample) for id_ in request_ids for sample in self._requests[id_].samples}

    def pause(self, request_ids: Iterable[str]) -> None:
        self._mark(request_ids, is_paused=True)

    def resume(self, request_ids: Iterable[str]) -> None:
        self._mark(request_ids, is_paused=False)

    def paused_of(self, request_ids: Iterable[str]) -> frozenset[str]:
        return frozenset(id_ for id_ in request_ids if self._requests[id_].is_paused)

    def sort(self, deltas: Iterable[Delta]) -> dict[str, list[Delta]]:
        """Group deltas by router and note the endings among them.

        Skip deltas of requests that were aborted while the step ran.
        """
        by_router: dict[str, list[Delta]] = {}
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            if request is None:
                continue
            request.has_begun = True
            by_router.setdefault(request.router_id, []).append(delta)
            if delta.finish is not None or delta.error is not None:
                self._note_end(delta, request)
        return by_router

    def _note_end(self, delta: Delta, request: _OpenRequest) -> None:
        self._departures.note()
        request.samples.discard(delta.sample)
        if not request.samples:
            del self._requests[delta.request_id]

    def _mark(self, request_ids: Iterable[str], *, is_paused: bool) -> None:
        for request_id in request_ids:
            self._requests[request_id].is_paused = is_paused
