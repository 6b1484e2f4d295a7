"""How many prompt tokens a step may compute beside sequences that decode, so that these do not stutter."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_ALLOWANCE = 16.0
LEAST_ALLOWANCE = 16.0
MEMORY = 0.8
"""How much of the former estimate a new measurement leaves."""
MOST_GROWTH = 1.25
MOST_FALL = 2.0
"""Between two steps; what was allowed too much is somebody's gap, what was allowed too little is made up for."""
FAIR_SHARE = 0.5
"""So many prompts behind the first, per sequence that decodes, are no reason to hurry."""
MOST_HURRY = 4.0


def work_clock(device_type: str) -> Callable[[], float]:
    """Seconds of what a step takes by itself, for the thread that computes it.

    On a CPU that is what the thread has computed: what other threads and programs take of the CPUs meanwhile would
    otherwise pass for the cost of a step, and ever more prompt work would seem to fit beside it.
    """
    return time.thread_time if device_type == "cpu" else time.perf_counter


class Pace:
    """Learns from the steps that were made what a step takes, and steers the prompt work of those to come.

    max_stretch: a step with prompt work should take at most so many times a step without, unless many prompts wait

    The prompt tokens allowed follow what they were seen to cost: no model of the machine, the context or the model is
    needed, and none has to be right. What is computed does not depend on it, only when.

    Where more than half as many prompts wait behind the first as sequences decode, a step may be stretched by more, in
    their proportion and up to four times as much: a step's weights are read for few rows until the others are there,
    so all are served sooner, those that decode included. A few long prompts beside many sequences hurry nobody.
    """

    def __init__(self, max_stretch: float) -> None:
        self._max_stretch = max_stretch
        self._decode_s: dict[int, float] = {}  # by the size of the number of rows
        self._allowance = FIRST_ALLOWANCE

    def allowance(self, num_decoding: int, budget: int, *, num_prompts: int = 1) -> int:
        """Prompt tokens for the next step, at most `budget`; all of it where nobody would have to wait.

        0 where it is not known yet what a step without takes: the next one shows it.
        """
        if num_decoding == 0:
            return budget
        if not self._decode_s:
            return 0
        return max(1, min(budget, int(self._allowance * _hurry(num_prompts, num_decoding))))

    def note(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step; seconds as `work_clock` counts them."""
        if num_decoding == 0:
            return
        if num_prompt_tokens == 0:
            size = num_decoding.bit_length()
            self._decode_s[size] = MEMORY * self._decode_s.get(size, seconds) + (1 - MEMORY) * seconds
        elif (decode_s := self._decode_estimate(num_decoding)) is not None:
            self._steer(num_prompt_tokens, extra_s=seconds - decode_s, allowed_s=(self._max_stretch - 1) * decode_s)

    def _steer(self, num_prompt_tokens: int, *, extra_s: float, allowed_s: float) -> None:
        wanted = num_prompt_tokens * allowed_s / max(extra_s, 1e-9)
        if wanted > self._allowance and num_prompt_tokens < 0.8 * self._allowance:
            return  # a step with less work than allowed says nothing of more
        wanted = min(max(wanted, self._allowance / MOST_FALL), self._allowance * MOST_GROWTH)
        self._allowance = min(max(wanted, LEAST_ALLOWANCE), 1e6)

    def _decode_estimate(self, num_decoding: int) -> float | None:
        """Of the nearest size that was seen."""
        if not self._decode_s:
            return None
        size = num_decoding.bit_length()
        return self._decode_s[min(self._decode_s, key=lambda seen: (abs(seen - size), seen))]


def _hurry(num_prompts: int, num_decoding: int) -> float:
    """How many times as far a step may be stretched."""
    return min(max((num_prompts - 1) / (FAIR_SHARE * num_decoding), 1.0), MOST_HURRY)
