"""An engine that notes of each step what it was made of, where its time went, and what the thread waited for."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve_app.core.delta import Delta
from serve_app.engine.engine import Engine

# nanoseconds on a CPU, in the queue for one
SCHEDULING = "/proc/thread-self/schedstat"
TASKS = "/proc/self/task"
STEPS_TO_KNOW = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One step. Times are in milliseconds, `at` in seconds on the monotonic clock.

    cpu:      what the thread computed;  queued: for how long it could have, but others had the CPUs
    helpers_queued: for how long those that compute with it could have, for which it waits, computing
    cycle, cycle_queued: from the end of the step before to this one's
    parts:    of `wall`, by the word of the engine's loop
    collected: what Python's collector took of it
    num_loads: adapters sent for since the step before
    """

    at: float
    wall: float
    cpu: float
    queued: float
    helpers_queued: float
    cycle: float
    cycle_queued: float
    parts: dict[str, float]
    collected: float
    num_decoding: int
    num_prompt_tokens: int
    num_loads: int

    @property
    def blocked(self) -> float:
        """Neither computing nor in the queue: it waited for a lock, Python's own among them, or for other threads."""
        return max(0.0, self.wall - self.cpu - self.queued)

    @property
    def own(self) -> float:
        """From token to token of a row that every step computes, if no other program had taken the CPUs."""
        return self.cycle - self.cycle_queued

    def as_dict(self) -> dict[str, object]:
        return {
            "own": round(self.own, 1), "wall": round(self.wall, 1), "cpu": round(self.cpu, 1),
            "queued": round(self.queued, 1), "blocked": round(self.blocked, 1), "collected": round(self.collected, 1),
            "parts": {name: round(spent, 1) for name, spent in self.parts.items() if spent >= 0.05},
            "decoding": self.num_decoding, "prompt_tokens": self.num_prompt_tokens, "loads": self.num_loads,
            "helpers_queued": round(self.helpers_queued, 1),
        }  # fmt: skip


class Timed:
    """Hands every call on, and adds up what it takes."""

    def __init__(self, inner: Any, name: str, spent: Counter[str]) -> None:
        self._inner, self._name, self._spent = inner, name, spent

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._timed(found) if name in ("schedule", "forward", "begin", "finish") else found

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") and name in ("_inner", "_name", "_spent"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._spent[self._name] += (time.perf_counter() - began) * 1e3

        return timed


class Collections:
    """What Python's collector took, of whichever thread it stopped: it stops all."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.worst_ms = 0.0
        self._began = 0.0
        gc.callbacks.append(self._note)

    def close(self) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
            return
        took = (time.perf_counter() - self._began) * 1e3
        self.ms += took
        self.worst_ms = max(self.worst_ms, took)


class WatchedEngine(Engine):
    """Its `steps` are all that were computed since they were cleared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[Watched] = []
        self.collections = Collections()
        self._spent: Counter[str] = Counter()
        self._batch: Any = None
        self._scheduler: Any = Timed(self._scheduler, "schedule", self._spent)
        async_steps: Any = self._steps
        for name, word in (("_runner", "forward"), ("_verifier", "draw")):
            setattr(async_steps, name, Timed(getattr(async_steps, name), word, self._spent))
        self._num_loads = 0
        self._ended_at, self._queued_before = 0.0, 0
        self._helpers: list[int] | None = None

    def step(self) -> list[Delta]:
        self._spent.clear()
        collected, num_steps = self.collections.ms, self.num_steps
        cpu, queued = thread_ns()
        helpers_queued = self._helpers_queued_ns()
        at = time.monotonic()
        deltas = super().step()
        wall = (time.monotonic() - at) * 1e3
        cpu_after, queued_after = thread_ns()
        if self.num_steps > num_steps:
            loads = self._slots.num_loads
            self.steps.append(
                Watched(
                    at=at,
                    wall=wall,
                    cpu=(cpu_after - cpu) / 1e6,
                    queued=(queued_after - queued) / 1e6,
                    helpers_queued=(self._helpers_queued_ns() - helpers_queued) / 1e6,
                    cycle=(at - self._ended_at) * 1e3 + wall,
                    cycle_queued=(queued_after - self._queued_before) / 1e6,
                    parts={**self._spent, "settle": wall - self._spent.total()},
                    collected=self.collections.ms - collected,
                    num_decoding=self._batch.num_decoding,
                    num_prompt_tokens=self._batch.num_prompt_tokens,
                    num_loads=loads - self._num_loads,
                )
            )
            self._num_loads = loads
        self._ended_at, self._queued_before = at + wall / 1e3, queued_after
        return deltas

    def _helpers_queued_ns(self) -> int:
        """Of the threads that OpenMP has beside this one: those that have computed most, once it is known which."""
        if self._helpers is None and len(self.steps) == STEPS_TO_KNOW:
            former = {os.getpid(), threading.get_native_id()}  # the first thread has loaded the model
            others = sorted({int(each) for each in os.listdir(TASKS)} - former, key=task_ns, reverse=True)
            self._helpers = others[: self.config.threads - 1]
        return sum(task_ns(each)[1] for each in self._helpers or ())

    def _settle(self, batch: Any) -> list[Delta]:
        self._batch = batch
        return super()._settle(batch)


def task_ns(task: int) -> tuple[int, int]:
    """Nanoseconds that a thread has computed, and has waited for a CPU."""
    with open(f"{TASKS}/{task}/schedstat", encoding="ascii") as file:
        computed, queued, _ = file.read().split()
    return int(computed), int(queued)


def thread_ns() -> tuple[int, int]:
    """Nanoseconds this thread has computed, and has waited for a CPU."""
    with open(SCHEDULING, encoding="ascii") as file:
        _, queued, _ = file.read().split()
    return time.thread_time_ns(), int(queued)
