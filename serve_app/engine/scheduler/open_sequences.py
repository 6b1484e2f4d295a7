"""Which sequences were begun and have not ended, so that each ends in exactly one finish or one error."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from serve_app.core.delta import Delta
from serve_app.core.errors import EngineFailed


class OpenSequences:
    """The samples of each request that are still owed an ending, and which requests are paused.

    What a client knows a request by is kept until its ending was told.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._ended: list[str] = []
        self._samples: dict[str, set[int]] = {}
        self._paused: set[str] = set()

    @property
    def has_active(self) -> bool:
        """Whether any is neither ended nor paused."""
        return len(self._samples) > len(self._paused)

    @property
    def has_paused(self) -> bool:
        return bool(self._paused)

    @property
    def request_ids(self) -> frozenset[str]:
        return frozenset(self._samples)

    @property
    def active_request_ids(self) -> frozenset[str]:
        return frozenset(self._samples.keys() - self._paused)

    def begin(self, request_id: str, num_samples: int, *, client_request_id: str = "") -> None:
        self._names[request_id] = client_request_id
        self._samples[request_id] = set(range(num_samples))

    def names_of(self, request_ids: AbstractSet[str]) -> list[str]:
        """What clients know these requests by, the oldest first; of those whose ending was told nothing is known."""
        return [name for request_id, name in self._names.items() if request_id in request_ids]

    def note_told(self) -> None:
        """Every ending until now has reached whoever waits for it."""
        for request_id in self._ended:
            self._names.pop(request_id, None)
        self._ended.clear()

    def take(self, deltas: Iterable[Delta]) -> list[Delta]:
        """Give those of these deltas that belong to open sequences, and note the endings among them."""
        taken = []
        for delta in deltas:
            samples = self._samples.get(delta.request_id, set())
            if delta.sample not in samples:
                continue  # it was told another ending already
            taken.append(delta)
            if delta.finish is not None or delta.error is not None:
                samples.remove(delta.sample)
                if not samples:
                    self.end((delta.request_id,))
        return taken

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget requests whose end nobody waits for."""
        for request_id in request_ids:
            self._ended.append(request_id)
            self._samples.pop(request_id, None)
            self._paused.discard(request_id)

    def pause(self, request_ids: AbstractSet[str]) -> None:
        self._paused |= request_ids & self._samples.keys()

    def resume(self, request_ids: AbstractSet[str]) -> None:
        self._paused -= request_ids

    def lose(self, request_ids: Iterable[str], error: EngineFailed) -> list[Delta]:
        """End all that is open of these requests with an error each."""
        lost = [
            Delta(request_id=request_id, sample=sample, error=error)
            for request_id in sorted(request_ids)
            for sample in sorted(self._samples.get(request_id, ()))
        ]
        self.end({delta.request_id for delta in lost})
        return lost


def requests_of(deltas: Iterable[Delta]) -> frozenset[str]:
    """Whose results these are."""
    return frozenset(delta.request_id for delta in deltas)
