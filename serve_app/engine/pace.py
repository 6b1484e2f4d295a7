"""How many prompt tokens a step may compute beside sequences that decode, so that these do not stutter."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items

LEAST_TOKENS = 16
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
"""After so many steps with prompts one is made without, to see what it takes by now."""


def work_clock(device_type: str) -> Callable[[], float]:
    """Seconds of what a step takes by itself, for the thread that computes it.

    On a CPU that is what the thread has computed: what other threads and programs take of the CPUs meanwhile would
    otherwise pass for the cost of a step, and ever more prompt work would seem to fit beside it.
    """
    return time.thread_time if device_type == "cpu" else time.perf_counter


class Pace:
    """Learns from the steps that were made what a step takes, and steers the prompt work of those to come.

    max_stretch: a step with prompt work should take at most so many times a step without, unless many prompts wait
    least:       tokens of prompts that a step may compute all the same, so that these get on

    The prompt tokens allowed follow what they were seen to cost: no model of the machine, the context or the model is
    needed, and none has to be right. What is computed does not depend on it, only when.

    Where several short prompts wait behind the first, a step may be stretched by more, in their number's proportion and
    up to four times as much: a step's weights are read for few rows until the others are there, so all are served
    sooner, those that decode included. Long prompts hurry nobody. (32 prompts of 128 at once, for 64 tokens each: 1.07
    times the tokens per second of twice as much, and the last first token after 10.4 s for 13.1; eight times as much
    gave another 1.02, where a step may take seven times as long and not four.)
    """

    def __init__(self, max_stretch: float, least: int = LEAST_TOKENS) -> None:
        self._max_stretch = max_stretch
        self._least = least
        self._decode_s: dict[int, float] = {}  # by the size of the number of rows
        self._num_since: dict[int, int] = {}  # steps with prompts since that was seen
        self._allowance = float(least)

    def allowance(self, num_decoding: int, budget: int, *, behind: Items[int] = ()) -> int:
        """Prompt tokens for the next step, at most `budget`; all of it where nobody would have to wait.

        behind: the tokens that each prompt behind the first misses

        0 where it is not known, or no longer, what a step of that size without takes: the next one shows it. Another
        size's would make prompts look dearer than they are, or cheaper.
        """
        if num_decoding == 0:
            return budget
        if self._num_since.get(_size(num_decoding), LOOK_AGAIN) >= LOOK_AGAIN:
            return 0
        return max(1, min(budget, int(self._allowance * _hurry(behind, num_decoding))))

    def note(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step; seconds as `work_clock` counts them."""
        if num_decoding == 0:
            return
        size = _size(num_decoding)
        if num_prompt_tokens == 0:
            self._decode_s[size] = MEMORY * self._decode_s.get(size, seconds) + (1 - MEMORY) * seconds
            self._num_since[size] = 0
        elif size in self._decode_s:
            decode_s = self._decode_s[size]
            self._num_since[size] += 1
            self._steer(num_prompt_tokens, extra_s=seconds - decode_s, allowed_s=(self._max_stretch - 1) * decode_s)

    def _steer(self, num_prompt_tokens: int, *, extra_s: float, allowed_s: float) -> None:
        wanted = num_prompt_tokens * allowed_s / max(extra_s, 1e-9)
        if wanted > self._allowance and num_prompt_tokens < 0.8 * self._allowance:
            return  # a step with less work than allowed says nothing of more
        wanted = min(max(wanted, self._allowance / MOST_FALL), self._allowance * MOST_GROWTH)
        self._allowance = min(max(wanted, self._least), 1e6)


def _size(num_decoding: int) -> int:
    """Which of the half octaves 1, 2, 3, 4–5, 6–7, 8–11, 12–15, … a number of rows is in."""
    return 2 * num_decoding.bit_length() + (num_decoding >> max(num_decoding.bit_length() - 2, 0) & 1)


def _hurry(behind: Items[int], num_decoding: int) -> float:
    """How many times as far a step may be stretched."""
    num_short = sum(min(1.0, SHORT_PROMPT / num_tokens) for num_tokens in behind)
    no_reason = min(num_decoding / FEW, max(1.0, num_decoding / MANY))
    return min(max(num_short / no_reason, 1.0), MOST_HURRY)
