"""Guesses the next tokens of one sequence from its prompt, its text or its client's prediction.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference", arXiv 2304.04487): what
followed the last few tokens where they occurred before is likely to follow now.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

import torch

SIZES = (5, 3, 2)
"""Of the runs that are looked for, the longest first; what goes on matching is followed and not looked for again."""
PREDICTED = 8
"""A prediction's beginning counts as a match of so many tokens."""
FIRST_CHANCES = (0.3, 0.3, 0.3, 0.5, 0.7, 0.8)
"""By level, before anything was seen: what prompts of prose and code gave, rounded down."""
FIRST_WEIGHT = 8.0
SHARED_WEIGHT = 4.0
"""How many guesses of its own outweigh what all sequences before a sequence have told."""
MEMORY = 0.9
SHARED_MEMORY = 0.995
"""What a further guess leaves of the counts before it: of a sequence's, and of all sequences'."""
FACTOR = 0x2C1B3C6D  # of the hash of a run; below 2**31, so that a torch product of it with 32 bits keeps to 63
LOW = 0xFFFFFFFF
LEAST_SLOTS = 256
MOST_SLOTS = 1 << 17
"""Half a mebibyte; of a longer list, what was seen long ago is forgotten as newer tokens take its slots."""
SLOTS_PER_TOKEN = 2


class Guesser:
    """Guesses for one sequence. Its state is about tokens alone, and preemption leaves it as it is.

    prediction: tokens that the client expects; they count as if they stood before the prompt
    trust:      how often its guesses came true
    num_matched: tokens before the guess that are those before its source, at least
    """

    def __init__(self, prediction: Items[int], trust: Trust) -> None:
        self.trust = trust
        self._tokens = array("i", prediction)
        self._num_predicted = len(prediction)
        self._num_taken = 0
        self._ngrams = [Ngrams(size) for size in SIZES]
        self._follows: int | None = None  # the place of the token that is guessed to come next
        self.num_matched = 0

    @property
    def is_prediction(self) -> bool:
        """Whether what would be guessed is the client's prediction."""
        return self._follows is not None and self._follows < self._num_predicted

    def catch_up(self, token_ids: Items[int], prompt_length: int) -> None:
        """Take what `token_ids` has gained since the last call, and see which guesses came true."""
        if self._num_taken < prompt_length:
            self._tokens.extend(token_ids[:prompt_length])
            self._num_taken = prompt_length
            if self._num_predicted:
                self._follows, self.num_matched = 0, PREDICTED
            else:
                self._look()
        for token_id in token_ids[self._num_taken :]:
            self._take(token_id)
        self._num_taken = len(token_ids)

    def guess(self, count: int) -> tuple[int, ...]:
        """Return what comes next, at most `count` tokens; may reach into itself, as in a text that repeats itself."""
        if self._follows is None:
            return ()
        begin, size = self._follows, len(self._tokens)
        end = min(begin + count, self._num_predicted if self.is_prediction else begin + count)
        found = list(self._tokens[begin:end])
        while len(found) < end - begin:
            found.append(found[len(found) - (size - begin)])
        return tuple(found)

    def _take(self, token_id: int) -> None:
        if self._follows is not None:
            is_hit = self._tokens[self._follows] == token_id
            self.trust.note(level_of(self.num_matched), is_hit=is_hit)
            self._go_on(is_hit=is_hit)
        self._tokens.append(token_id)
        self._look()

    def _go_on(self, *, is_hit: bool) -> None:
        """Follow by one token; behind one that differs it may still go on as before, which is believed once."""
        assert self._follows is not None, "nothing is followed"
        if not is_hit and self.num_matched == 0:
            self._follows = None
            return
        ends_prediction = self._follows + 1 == self._num_predicted
        self._follows = None if ends_prediction else self._follows + 1
        self.num_matched = self.num_matched + 1 if is_hit and not ends_prediction else 0

    def _look(self) -> None:
        """Follow what matches more of the end than what is followed now; then the end can be found, too."""
        for ngrams in self._ngrams:
            ngrams.add(self._tokens, len(self._tokens) - 1)
        for ngrams in self._ngrams:
            if ngrams.size <= self.num_matched:
                return
            if (found := ngrams.find(self._tokens)) is not None:
                self._follows, self.num_matched = found, ngrams.size
                return


def level_of(num_matched: int) -> int:
    """Return the level by powers of two: 0, 1, 2 to 3, 4 to 7, 8 to 15, and more."""
    return min(num_matched.bit_length(), len(FIRST_CHANCES) - 1)


class Trust:
    """Counts hits and misses, old ones for less. A sequence's begins with what its engine's has learned.

    Every guess counts, computed or not: whether a token was guessed is known once it is drawn. So nothing has to be
    tried to be trusted again, and a text whose guesses miss costs nothing but the looking.
    """

    def __init__(self, shared: Trust | None = None) -> None:
        self._shared = shared
        self._memory = SHARED_MEMORY if shared is None else MEMORY
        self._hits = [0.0] * len(FIRST_CHANCES)
        self._tries = [0.0] * len(FIRST_CHANCES)

    def note(self, level: int, *, is_hit: bool) -> None:
        self._hits[level] = self._hits[level] * self._memory + is_hit
        self._tries[level] = self._tries[level] * self._memory + 1.0
        if self._shared is not None:
            self._shared.note(level, is_hit=is_hit)

    def chance(self, level: int) -> float:
        """Return the chance that the next token is the guessed one, in (0, 1)."""
        before, weight = self._before(level)
        return (self._hits[level] + before * weight) / (self._tries[level] + weight)

    def chances(self, num_matched: int, count: int) -> Items[float]:
        """Return the chances that the first 1, 2, … `count` tokens of a guess all come true."""
        found, together = [], 1.0
        for offset in range(count):
            together *= self.chance(level_of(num_matched + offset))
            found.append(together)
        return found

    def _before(self, level: int) -> tuple[float, float]:
        if self._shared is None:
            return FIRST_CHANCES[level], FIRST_WEIGHT
        return self._shared.chance(level), SHARED_WEIGHT


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
        """Add the runs that end up to `end`; none was left out before."""
        if SLOTS_PER_TOKEN * end > len(self._ends) < MOST_SLOTS or end - self._num_added > LEAST_SLOTS:
            self._rebuild(tokens, end)
        else:
            for place in range(max(self._num_added + 1, self.size), end + 1):
                self._ends[self._slot(tokens, place)] = place
        self._num_added = end

    def find(self, tokens: array[int]) -> int | None:
        """Return the place behind the latest run that was added and that equals the last tokens."""
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
        """Add all runs at once, into a table of the size that they need."""
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
