"""How often each token occurs in the part of a sequence that a penalty sees, kept up to date token by token."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as Items

import torch
from torch import Tensor


class TokenCounts:
    """Counts over a growing list of tokens, from position `begin` on, or over its last `window` tokens.

    A step costs what was added and what left the window; the tensors are one copy of memory.
    """

    def __init__(self, *, begin: int = 0, window: int | None = None) -> None:
        self._begin = begin
        self._end = begin
        self._window = window
        self._place: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("f")

    def catch_up(self, token_ids: Items[int]) -> None:
        """Count what `token_ids` has gained since the last call."""
        end = len(token_ids)
        begin = self._begin if self._window is None else max(self._begin, end - self._window)
        for token_id in token_ids[self._begin : min(begin, self._end)]:
            self._remove(token_id)
        for token_id, count in Counter(token_ids[max(begin, self._end) : end]).items():
            self._add(token_id, count)
        self._begin, self._end = begin, end

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def token_ids(self) -> Tensor:
        """[n] int64, each token seen once, in no particular order."""
        return torch.frombuffer(self._ids, dtype=torch.int64).clone() if self._ids else torch.empty(0).long()

    @property
    def counts(self) -> Tensor:
        """[n] float32, beside `token_ids`."""
        return torch.frombuffer(self._counts, dtype=torch.float32).clone() if self._counts else torch.empty(0)

    def _add(self, token_id: int, count: int) -> None:
        place = self._place.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0.0)
        self._counts[place] += count

    def _remove(self, token_id: int) -> None:
        place = self._place[token_id]
        self._counts[place] -= 1.0
        if self._counts[place] == 0.0:  # the last one moves into the gap
            last_id, last_count = self._ids.pop(), self._counts.pop()
            if last_id != token_id:
                self._ids[place], self._counts[place] = last_id, last_count
                self._place[last_id] = place
            del self._place[token_id]
