"""Replicas on a virtual clock: each computes one request after another, and keeps the prefixes that it computed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from serve_app.core.delta import PromptReport
from serve_app.core.names import ModelRef, Part, mixed
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest
from serve_app.router.link import Guess
from serve_app.router.placement import Placement

BASE = ModelRef(base="tiny")
TOKEN_CHARS = 4
BLOCK_TOKENS = 16
PREFILL_S = 1 / 2000
DECODE_S = 1 / 200
LOAD_S = 0.2


def asking(text: str, model: ModelRef = BASE, *, n: int = 1, salt: str = "") -> GenerationRequest:
    return GenerationRequest(request_id="r", model=model, prompt=Prompt(parts=(text,)), n=n, cache_salt=salt)


def adapter(version: str) -> ModelRef:
    return mixed("tiny", [Part(adapter=version, version=version)])


def documents(number: int, *, num_tokens: int = 2000, seed: int = 0) -> list[str]:
    """Texts that share nothing."""
    random = Random(seed)
    return ["".join(random.choices("abcdefgh", k=num_tokens * TOKEN_CHARS)) for _ in range(number)]


def questions(texts: Sequence[str], times: int, *, seed: int = 0) -> list[str]:
    """Each text so often, with a question of its own behind it, in random order."""
    asked = [f"{text}\nquestion {number}: what is told of it?" for text in texts for number in range(times)]
    Random(seed).shuffle(asked)
    return asked


@dataclass(slots=True)
class VirtualReplica:
    """A replica as a router sees it, and what it really holds. free_at: seconds on the fleet's clock"""

    replica_id: str
    capacity: int = 100
    work: int = 0
    num_foreign: int = 0
    num_prompt_tokens: int = 0
    pace: float | None = None
    speed: float = 1.0
    num_slots: int = 4
    num_given: int = 0
    num_loads: int = 0
    free_at: float = 0.0
    blocks: set[int] = field(default_factory=set)
    slots: dict[str, None] = field(default_factory=dict)

    def prefill(self, request: GenerationRequest) -> PromptReport:
        """Take a prompt in; from then on its whole blocks are cached."""
        text = request.prompt.text or ""
        size = TOKEN_CHARS * BLOCK_TOKENS
        names = [hash((request.model.salt, request.cache_salt, text[:end])) for end in range(size, len(text), size)]
        num_cached = next((at for at, name in enumerate(names) if name not in self.blocks), len(names))
        self.blocks.update(names)
        return PromptReport(num_tokens=len(text) // TOKEN_CHARS, num_cached_tokens=BLOCK_TOKENS * num_cached)

    def load(self, request: GenerationRequest) -> int:
        """Bring the adapters of a request into slots; return how many had to be brought."""
        num_before = self.num_loads
        for part in request.model.parts:
            self.num_loads += part.version not in self.slots
            self.slots.pop(part.version, None)
            self.slots[part.version] = None
            while len(self.slots) > self.num_slots:
                del self.slots[next(iter(self.slots))]
        return self.num_loads - num_before


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request. first_s: from its arrival to its first token; None where it was refused"""

    replica_id: str
    num_cached: int = 0
    first_s: float | None = None


@dataclass(slots=True)
class VirtualFleet:
    """Replicas and the routers before them.

    max_waiting: sequences of a replica beyond which it refuses
    """

    replicas: list[VirtualReplica]
    placements: list[Placement]
    max_waiting: int = 1 << 30
    now: float = 0.0
    served: list[Served] = field(default_factory=list)
    peaks: list[tuple[int, int]] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    @classmethod
    def of(cls, num_replicas: int, *placements: Placement, max_waiting: int = 1 << 30) -> VirtualFleet:
        replicas = [VirtualReplica(f"replica-{number}") for number in range(num_replicas)]
        return cls(replicas, list(placements), max_waiting)

    @property
    def num_cached(self) -> int:
        return sum(each.num_cached for each in self.served)

    @property
    def num_refused(self) -> int:
        return sum(each.first_s is None for each in self.served)

    def percentile(self, part: float) -> float:
        """Of the seconds to the first token."""
        times = sorted(each.first_s for each in self.served if each.first_s is not None)
        return times[min(len(times) - 1, int(part * len(times)))]

    def arrive(self, at: float, request: GenerationRequest, num_tokens: int = 20, router: int = 0) -> None:
        """Have a request come at a time."""
        self._at(at, lambda: self._take(request, num_tokens, router))

    def in_turn(self, requests: Iterable[GenerationRequest], *, at_once: int, num_tokens: int = 20) -> None:
        """So many clients, each of which asks when its last request is answered."""
        left = iter(requests)

        def next_one() -> None:
            request = next(left, None)
            if request is not None:
                self._take(request, num_tokens, 0, next_one)

        for _ in range(at_once):
            self._at(self.now, next_one)
        self.run()

    def run(self) -> None:
        while self._events:
            self.now, _, happens = heapq.heappop(self._events)
            happens()

    def _at(self, at: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), happens))

    def _take(
        self, request: GenerationRequest, num_tokens: int, router: int, then: Callable[[], None] = lambda: None
    ) -> None:
        replica, guess = self.placements[router].begin().choose(request, self.replicas)
        if replica.work >= self.max_waiting:
            self.served.append(Served(replica.replica_id))
            return
        report = replica.prefill(request)
        busy_s = PREFILL_S * (report.num_tokens - report.num_cached_tokens) / replica.speed
        first_at = max(self.now, replica.free_at) + busy_s + LOAD_S * replica.load(request)
        replica.free_at = first_at + DECODE_S * num_tokens / replica.speed
        replica.work += 1
        replica.num_given += 1
        num_missing = int(guess.num_missing)
        replica.num_prompt_tokens += num_missing
        self.served.append(Served(replica.replica_id, report.num_cached_tokens, first_at - self.now))
        self._at(first_at, lambda: _hear(replica, num_missing, guess, report))
        self._at(replica.free_at, lambda: _end(replica, guess, num_tokens, then))


def _hear(replica: VirtualReplica, num_missing: int, guess: Guess, report: PromptReport) -> None:
    replica.num_prompt_tokens -= num_missing
    guess.habits.learn_prompt(guess, report)


def _end(replica: VirtualReplica, guess: Guess, num_tokens: int, then: Callable[[], None]) -> None:
    replica.work -= 1
    guess.habits.learn_completion(num_tokens)
    then()
