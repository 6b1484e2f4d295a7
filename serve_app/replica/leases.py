"""How long ago each router was heard of, counted only while somebody listened."""

from __future__ import annotations

from collections.abc import Callable


class Leases:
    """Names the routers that fell silent. `expired` is to be called once every `period_s`.

    A process that was stopped, or an event loop that was held up, has heard nobody: what `expired` is late by counts
    for no router.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self.period_s = lease_s / 4
        self._clock = clock
        self._heard_at: dict[str, float] = {}
        self._looked_at = clock()

    def hear(self, router_id: str) -> None:
        self._heard_at[router_id] = self._clock()

    def expired(self) -> list[str]:
        """Forget and return those not heard of for the lease's time."""
        now = self._clock()
        overslept = max(0.0, now - self._looked_at - self.period_s)
        self._looked_at = now
        self._heard_at = {id_: min(now, heard_at + overslept) for id_, heard_at in self._heard_at.items()}
        silent = [id_ for id_, heard_at in self._heard_at.items() if heard_at < now - self.lease_s]
        for router_id in silent:
            del self._heard_at[router_id]
        return silent
