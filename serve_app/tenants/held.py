"""What a router holds of the directory, and for how long it goes by it without hearing anything new."""

from __future__ import annotations

from serve_app.core.errors import Unavailable
from serve_app.core.tenants import Identity
from serve_app.tenants.directory import Directory

RETRY_S = 2


class HeldDirectory:
    """grace_s: what was heard last is good for so long; then nobody is let in

    Times called `heard_at` and `at` are of one monotonic clock, in seconds.
    """

    def __init__(self, *, grace_s: float) -> None:
        self.grace_s = grace_s
        self._directory: Directory | None = None
        self._heard_at = 0.0

    @property
    def version(self) -> int:
        """Of what is held; -1 where nothing is."""
        return -1 if self._directory is None else self._directory.version

    @property
    def origins(self) -> frozenset[str]:
        return frozenset() if self._directory is None else self._directory.origins

    def hear(self, directory: Directory | None, heard_at: float) -> None:
        """directory: None says that what is held is what there is

        What was asked for earlier than what is held, and comes later, is passed over.
        """
        if heard_at < self._heard_at:
            return
        if directory is not None:
            self._directory = directory
        self._heard_at = heard_at

    def age_s(self, at: float) -> float:
        """Since anything was heard; seconds."""
        return at - self._heard_at

    def is_good(self, key_id: str, *, now: float) -> bool:
        """As `Directory.is_good`, by what was heard last, however long ago."""
        return self._directory is None or self._directory.is_good(key_id, now)

    def identify(self, presented: str | None, *, now: float, at: float) -> Identity:
        """now: Unix seconds. Raises Unauthenticated; Unavailable where nothing was heard for too long."""
        if self._directory is None or self.age_s(at) > self.grace_s:
            message = "The service cannot tell whose keys are good at the moment; retry."
            raise Unavailable(message, None, {"retry_after_s": RETRY_S})
        return self._directory.identify(presented, now)
