"""Keeps which requests a replica was given, where their deltas go, and how many of their sequences have not ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from serve_app.core.delta import Delta
from serve_app.core.errors import ServeError
from serve_app.core.request import GenerationRequest

Receive = Callable[[Delta], None]
"""Takes the deltas of a request."""


@dataclass(slots=True)
class Registration:
    """Where the deltas of a request go, what its client knows it by, and how many of its sequences have not ended."""

    client_request_id: str
    receive: Receive
    num_unfinished: int


class Registry:
    """The requests of one link. A request leaves it with its last sequence, or when it is forgotten."""

    def __init__(self) -> None:
        self._live: dict[str, Registration] = {}
        self._num_outstanding = 0

    @property
    def num_outstanding(self) -> int:
        """Sequences that have not ended."""
        return self._num_outstanding

    def names_of(self, request_ids: Iterable[str] | None = None) -> list[str]:
        """What clients know these requests by, or all of them; of those that are not here nothing is known."""
        found = (self._live.get(each) for each in (self._live if request_ids is None else request_ids))
        return [each.client_request_id for each in found if each is not None]

    def add(self, requests: Sequence[GenerationRequest], receive: Receive) -> None:
        for request in requests:
            assert request.request_id not in self._live, f"{request.request_id} was given twice"
            self._live[request.request_id] = Registration(
                client_request_id=request.client_request_id, receive=receive, num_unfinished=request.n
            )
            self._num_outstanding += request.n

    def dispatch(self, delta: Delta) -> None:
        """Bring a delta to its request; one of a request that was forgotten is dropped."""
        registration = self._live.get(delta.request_id)
        if registration is None:
            return
        if delta.finish is not None or delta.error is not None:
            registration.num_unfinished -= 1
            self._num_outstanding -= 1
            if registration.num_unfinished == 0:
                del self._live[delta.request_id]
        registration.receive(delta)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Dispatch nothing more to these; those unknown are left alone."""
        for request_id in request_ids:
            registration = self._live.pop(request_id, None)
            if registration is not None:
                self._num_outstanding -= registration.num_unfinished

    def lose(self, error_of: Callable[[], ServeError], request_ids: Sequence[str] | None = None) -> list[str]:
        """Forget requests, all of them where none is named, and send each a delta with an error of its own.

        Returns those that were there.
        """
        lost = list(self._live) if request_ids is None else [each for each in request_ids if each in self._live]
        receivers = {request_id: self._live[request_id].receive for request_id in lost}
        self.forget(lost)
        for request_id, receive in receivers.items():
            receive(Delta(request_id=request_id, sample=0, error=error_of()))
        return lost
