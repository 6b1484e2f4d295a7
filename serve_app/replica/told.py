"""What routers are told of each other: which prefixes the others have sent to a replica."""

from __future__ import annotations

from collections.abc import Sequence as Items

from serve_app.core.prefixes import prefixes_of
from serve_app.core.request import GenerationRequest

MAX_UNTOLD = 4096
"""Names for one router; of more it is not told."""


class Told:
    """Keeps names of prefixes for each router until it asks. A replica with one router keeps none."""

    def __init__(self, max_untold: int = MAX_UNTOLD) -> None:
        self._max_untold = max_untold
        self._untold: dict[str, dict[bytes, None]] = {}

    def note(self, router_id: str, requests: Items[GenerationRequest]) -> None:
        """Note what a router sent, for all others."""
        others = [names for id_, names in self._untold.items() if id_ != router_id]
        for request in requests if others else ():
            sent = prefixes_of(request).names
            for names in others:
                names |= dict.fromkeys(sent[: max(0, self._max_untold - len(names))])

    def take(self, router_id: str) -> tuple[bytes, ...]:
        """Return what other routers sent since this one last asked; shorter prefixes of a prompt first."""
        names = self._untold.get(router_id, {})
        self._untold[router_id] = {}
        return tuple(names)

    def forget(self, router_id: str) -> None:
        """Keep nothing more for a router that is gone."""
        self._untold.pop(router_id, None)
