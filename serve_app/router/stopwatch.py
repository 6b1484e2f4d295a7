"""Takes the times of one response from its events."""

from __future__ import annotations

import time
from collections.abc import Callable

from serve_app.api.timings import Timings
from serve_app.router.run import Event


class Stopwatch:
    """Runs from its making; `note` is to be called with every event, when it comes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = clock()
        self._first_at: float | None = None
        self._last_at = self._started_at
        self._num_cached_tokens = 0
        self._num_prompt_tokens = 0
        self._num_predicted: dict[int, int] = {}

    @property
    def timings(self) -> Timings:
        """As of the last event."""
        first_at = self._last_at if self._first_at is None else self._first_at
        return Timings(
            num_cached_tokens=self._num_cached_tokens,
            num_prompt_tokens=self._num_prompt_tokens - self._num_cached_tokens,
            num_predicted_tokens=sum(self._num_predicted.values()),
            prompt_s=first_at - self._started_at,
            predicted_s=self._last_at - first_at,
        )

    def note(self, event: Event) -> None:
        self._last_at = self._clock()
        if self._first_at is None:
            self._first_at = self._last_at
        delta, index = event.delta, event.index
        if delta.prompt is not None:
            self._num_cached_tokens += delta.prompt.num_cached_tokens
            self._num_prompt_tokens += delta.prompt.num_tokens
        num_tokens = self._num_predicted.get(index, 0) + len(delta.token_ids)
        self._num_predicted[index] = num_tokens if delta.finish is None else delta.finish.num_tokens
