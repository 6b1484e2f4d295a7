"""Images that were seen, kept for the next prompt that has them, within a budget."""

from __future__ import annotations

import threading
from collections import OrderedDict

from serve_app.engine.vision.seen import Seen


class SeenImages:
    """By the digest of their files; the one used longest ago goes first. Threads may share it.

    max_bytes: of their embeddings together; an image larger than that is not kept
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Seen] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_hits = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, digest: bytes) -> Seen | None:
        with self._lock:
            seen = self._kept.get(digest)
            if seen is not None:
                self._kept.move_to_end(digest)
                self.num_hits += 1
            return seen

    def keep(self, seen: Seen) -> None:
        with self._lock:
            if seen.digest in self._kept or seen.num_bytes > self._max_bytes:
                return
            self._kept[seen.digest] = seen
            self.num_bytes += seen.num_bytes
            while self.num_bytes > self._max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self.num_bytes -= oldest.num_bytes
