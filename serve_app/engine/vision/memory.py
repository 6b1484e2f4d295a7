"""Images that were seen, kept for the next prompt that has them, within a budget."""

from __future__ import annotations

import threading
from collections import OrderedDict

from serve_app.core.shares import CacheEntry, next_to_evict
from serve_app.engine.vision.seen import Seen


class SeenImages:
    """By the salt of whoever may find them, or the time of an answer would tell one tenant what another has sent, and
    the digest of their files. Of the flow that has most the one used longest ago goes first. Threads may share it.

    max_bytes: of their embeddings together; an image larger than that is not kept
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, bytes], tuple[str, Seen]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_hits = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, digest: bytes, *, salt: str) -> Seen | None:
        with self._lock:
            if (salt, digest) not in self._kept:
                return None
            self._kept.move_to_end((salt, digest))
            self.num_hits += 1
            return self._kept[salt, digest][1]

    def keep(self, seen: Seen, *, salt: str, flow: str) -> None:
        """flow: that asked for it"""
        with self._lock:
            if (salt, seen.digest) in self._kept or seen.num_bytes > self._max_bytes:
                return
            self._kept[salt, seen.digest] = flow, seen
            self.num_bytes += seen.num_bytes
            while self.num_bytes > self._max_bytes:
                self._forget_one()

    def _forget_one(self) -> None:
        key = next_to_evict(
            CacheEntry(key=key, flow=flow, size=seen.num_bytes) for key, (flow, seen) in self._kept.items()
        )
        assert key is not None, "there are bytes of none"
        _, oldest = self._kept.pop(key)
        self.num_bytes -= oldest.num_bytes
