"""Learns how many prompt tokens and extra rows a step may compute beside sequences that decode."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items

from serve_app.engine.scheduler.policy import NONE_BEYOND, Beyond

LEAST_TOKENS = 8
FIRST_TOKENS = 16
LEAST_ROWS = 4
MEMORY = 0.5
"""How much of the former estimate a new measurement leaves."""
MOST_GROWTH = 1.25
MOST_FALL = 2.0
"""Between two steps; what was allowed too much is somebody's gap, what was allowed too little is made up for."""
FEW = 8
"""Sequences that decode, up to which one prompt behind the first is a reason to hurry, by how much fewer there are."""
MANY = 32
"""Beyond so many, one prompt for each so many is none."""
SHORT_PROMPT = 256
"""Tokens; a prompt of twice as many is half a reason to hurry, as those that decode would wait twice as long for it."""
MOST_HURRY = 4.0
LOOK_AGAIN = 32
"""After so many steps with prompts, or rows of others, one is made without, to see what it takes by now."""
LOOK_SELDOM = 8
"""So many times as seldom where nothing of others was left out."""


def work_clock(device_type: str) -> Callable[[], float]:
    """Return a clock of what a step takes by itself, in seconds, for the thread that computes it.

    On a CPU that is what the thread has computed: what other threads and programs take of the CPUs meanwhile would
    otherwise pass for the cost of a step, and ever more prompt work would seem to fit beside it.
    """
    return time.thread_time if device_type == "cpu" else time.perf_counter


class Pace:
    """Learns from the steps that were made what a step takes, and steers the prompt work of those to come.

    max_stretch: a step with prompt work should take at most so many times a step without, unless many prompts wait.
                 Rows beyond those of other flows may stretch a step half as far, or to `max_stretch` times a step
                 with the rows of the flow that has the fewest
    least:       tokens of prompts that a step may compute all the same, so that these get on

    The prompt tokens allowed follow what they were seen to cost: no model of the machine, the context or the model is
    needed, and none has to be right. What is computed does not depend on it, only when.

    If several short prompts wait behind the first, a step may be stretched by more: in proportion to their number, up
    to four times as much. A step reads all weights for few rows until those are there, so all are served sooner.
    Long prompts hurry nobody.
    """

    def __init__(self, max_stretch: float, least: int = LEAST_TOKENS) -> None:
        self._max_stretch = max_stretch
        self._tokens, self._rows = Allowance(least, max(least, FIRST_TOKENS)), Allowance(LEAST_ROWS, LEAST_ROWS)
        self._decode_s: dict[int, float] = {}  # by the size of the number of rows
        self._num_since: dict[int, int] = {}  # steps with prompts since that was seen
        self._num_beyond_since: dict[int, int] = {}  # steps with rows beyond so many

    def allowance(self, num_decoding: int, budget: int, *, behind: Items[int] = (), is_shared: bool = False) -> int:
        """Return the prompt tokens for the next step, at most `budget`; all of it if nobody would have to wait.

        behind:    the tokens that each prompt behind the first misses
        is_shared: with rows beyond others' that not all are in the step either, so that each has half of what it might

        0 where it is not known, or no longer, what a step of that size without takes: the next one shows it. Another
        size's would make prompts look dearer than they are, or cheaper.
        """
        if num_decoding == 0:
            return budget
        if self._num_since.get(_size(num_decoding), LOOK_AGAIN) >= LOOK_AGAIN:
            return 0
        allowed = self._tokens.amount * _hurry(behind, num_decoding)
        return max(1, min(budget, int(self._tokens.half_of(allowed) if is_shared else allowed)))

    def rows(self, num_level: int, num_beyond: int, *, is_shared: bool = False) -> int:
        """Return how many rows that some have beyond others the next step may compute beside those that all have.

        is_shared: with prompts

        0 where it is not known, or no longer, what a step without them takes: the next one shows it. Where it does not,
        as prompts end in it, they are not kept waiting for that.
        """
        amount = self._rows.amount
        size, allowed = _size(num_level), int(self._rows.half_of(amount) if is_shared else amount)
        many = LOOK_AGAIN if allowed < num_beyond else LOOK_AGAIN * LOOK_SELDOM
        if self._num_beyond_since.get(size, many) >= many:
            self._num_since[size] = LOOK_AGAIN  # nor are prompts in it
            self._num_beyond_since[size] = many - LOOK_SELDOM
            return 0
        return min(allowed, num_beyond)

    def note(self, num_decoding: int, num_prompt_tokens: int, seconds: float, *, beyond: Beyond = NONE_BEYOND) -> None:
        """Learn from a step; seconds as `work_clock` counts them.

        beyond: of the rows that decoded, those that `rows` allowed
        """
        if num_decoding == 0:
            return
        size, level = _size(num_decoding), _size(num_decoding - beyond.num_rows)
        is_of_level = beyond.num_rows == 0 or level != size
        if num_prompt_tokens == 0:
            self._num_since[size] = 0
            if is_of_level:
                self._decode_s[size] = MEMORY * self._decode_s.get(size, seconds) + (1 - MEMORY) * seconds
                self._num_beyond_since[size] = 0
        elif size in self._decode_s:
            self._num_since[size] += 1
            without_s = self._decode_s[size]
            self._tokens.steer(num_prompt_tokens, seconds - without_s, (self._max_stretch - 1) * without_s)
        if beyond.num_rows:
            self._num_beyond_since[level] = self._num_beyond_since.get(level, 0) + 1
            if num_prompt_tokens == 0 and level in self._decode_s:
                self._note_beyond(beyond, num_decoding, seconds, without_s=self._decode_s[level])

    def _note_beyond(self, beyond: Beyond, num_decoding: int, seconds: float, *, without_s: float) -> None:
        extra_s = seconds - without_s
        row_s = max(0.0, extra_s) / beyond.num_rows
        least_s = without_s - row_s * (num_decoding - beyond.num_rows - beyond.num_least)
        allowed_s = max((self._max_stretch - 1) / 2 * without_s, self._max_stretch * least_s - without_s)
        self._rows.steer(beyond.num_rows, extra_s, allowed_s)


class Allowance:
    """How much there may be in a step of what it could do without."""

    def __init__(self, least: int, first: int) -> None:
        self._least = least
        self.amount = float(first)

    def half_of(self, amount: float) -> float:
        return max(amount / 2, self._least)

    def steer(self, amount: int, extra_s: float, allowed_s: float) -> None:
        """Learn that `amount` took the step `extra_s` longer than one without, of which `allowed_s` is allowed."""
        wanted = amount * allowed_s / max(extra_s, 1e-9)
        if wanted > self.amount and amount < 0.8 * self.amount:
            return  # a step with less work than allowed says nothing of more
        wanted = min(max(wanted, self.amount / MOST_FALL), self.amount * MOST_GROWTH)
        self.amount = min(max(wanted, self._least), 1e6)


def _size(num_decoding: int) -> int:
    """Return which of the half octaves 1, 2, 3, 4–5, 6–7, 8–11, 12–15, … a number of rows is in."""
    return 2 * num_decoding.bit_length() + (num_decoding >> max(num_decoding.bit_length() - 2, 0) & 1)


def _hurry(behind: Items[int], num_decoding: int) -> float:
    """Return how many times as far a step may be stretched."""
    num_short = sum(min(1.0, SHORT_PROMPT / num_tokens) for num_tokens in behind)
    no_reason = min(num_decoding / FEW, max(1.0, num_decoding / MANY))
    return min(max(num_short / no_reason, 1.0), MOST_HURRY)
