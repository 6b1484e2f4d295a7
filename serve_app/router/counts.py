"""What replicas said that they spent and the ledger was not told yet."""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.core.ledger import Counted, Spent


class Counts:
    """Grows with the flows that something was computed for since it was taken, not with those that there ever were."""

    def __init__(self) -> None:
        self._untold: dict[tuple[str, str], Counted] = {}

    def note(self, replica_id: str, model: str, spent: Iterable[Spent]) -> None:
        """In any order: one that was passed on its way changes nothing."""
        for each in spent:
            self._keep(Counted(replica_id=replica_id, model=model, spent=each))

    def take(self) -> list[Counted]:
        """All of it; whoever could not tell the ledger gives it back."""
        untold, self._untold = self._untold, {}
        return list(untold.values())

    def give_back(self, counted: Iterable[Counted]) -> None:
        for each in counted:
            self._keep(each)

    def _keep(self, counted: Counted) -> None:
        key = counted.replica_id, counted.spent.flow
        before = self._untold.get(key)
        if before is not None and before.spent.engine_ns >= counted.spent.engine_ns:
            later = counted.spent.at_least(before.spent)
            counted = Counted(replica_id=counted.replica_id, model=counted.model, spent=later)
        self._untold[key] = counted
