"""Where the last few tokens of a growing list occurred before, in memory of a few words per token."""

from __future__ import annotations

from array import array

import torch

FACTOR = 0x2C1B3C6D  # below 2**31, so that a torch product of it with 32 bits keeps to 63
LOW = 0xFFFFFFFF
LEAST_SLOTS = 256
MOST_SLOTS = 1 << 17
"""Half a mebibyte; of a longer list, what was seen long ago is forgotten as newer tokens take its slots."""
SLOTS_PER_TOKEN = 2


class Ngrams:
    """The latest place of each run of `size` tokens, in a table that a newer run overwrites: a look-up costs one look.

    What is found is compared, so a slot that two runs share costs a match at most. A token costs one write; the table
    doubles with the tokens, which is one pass of torch over them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._ends = array("i", bytes(4 * LEAST_SLOTS))  # by slot, one place behind a run; 0 is none
        self._num_added = 0

    def add(self, tokens: array[int], end: int) -> None:
        """Take the runs that end up to `end`; none was left out before."""
        if SLOTS_PER_TOKEN * end > len(self._ends) < MOST_SLOTS or end - self._num_added > LEAST_SLOTS:
            self._rebuild(tokens, end)
        else:
            for place in range(max(self._num_added + 1, self.size), end + 1):
                self._ends[self._slot(tokens, place)] = place
        self._num_added = end

    def find(self, tokens: array[int]) -> int | None:
        """The place behind the latest run that was added and that equals the last tokens."""
        end, size = len(tokens), self.size
        if end < size:
            return None
        found = self._ends[self._slot(tokens, end)]
        if found == 0 or found == end or tokens[found - size : found] != tokens[end - size : end]:
            return None
        return found

    def _slot(self, tokens: array[int], end: int) -> int:
        number = 0
        for token_id in tokens[end - self.size : end]:
            number = (number * FACTOR + token_id) & LOW
        return (number ^ (number >> 15)) & (len(self._ends) - 1)

    def _rebuild(self, tokens: array[int], end: int) -> None:
        """Take all runs at once, into a table of the size that they need."""
        num_slots = LEAST_SLOTS
        while num_slots < min(SLOTS_PER_TOKEN * end, MOST_SLOTS):
            num_slots *= 2
        self._ends = array("i", bytes(4 * num_slots))
        count = end - self.size + 1
        if count <= 0:
            return
        every = torch.frombuffer(tokens, dtype=torch.int32, count=end).long()
        numbers = torch.zeros(count, dtype=torch.int64)
        for offset in range(self.size):
            numbers = (numbers * FACTOR + every[offset : offset + count]) & LOW
        slots = (numbers ^ (numbers >> 15)) & (num_slots - 1)
        places = torch.arange(self.size, end + 1, dtype=torch.int32)
        torch.frombuffer(self._ends, dtype=torch.int32).scatter_reduce_(0, slots, places, "amax")
