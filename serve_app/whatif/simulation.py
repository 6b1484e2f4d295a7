"""Runs a trace through a router's admission and placement onto simulated replicas, on a virtual clock."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from statistics import mean
from typing import Any, NamedTuple, TypeVar, cast, get_args

from serve_app.core.backend import Backend
from serve_app.core.cards import ModelCard
from serve_app.core.delta import Delta, PromptReport
from serve_app.core.errors import Overloaded
from serve_app.engine.config import EngineConfig
from serve_app.router.admission import Admission, AdmissionSettings, Room
from serve_app.router.link import ReplicaLink
from serve_app.router.placement import Placement, PlacementPolicy
from serve_app.whatif.costs import StepCosts, Work
from serve_app.whatif.replica import SimulatedReplica
from serve_app.whatif.trace import Asked, Unusable

ROUTER_ID = "router"
GREETING_S = 1.0
"""Between two looks of a router at what replicas say of themselves."""
BEGIN_S = 1.0
"""No time is 0, which some take for none."""
MOST_REPLICAS = 4096
"""That are tried before it is said that no number is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One model as it is deployed: the engine's settings, the router's, and what steps cost.

    num_replicas: as the file has it, of an autoscaled one the most
    """

    config: EngineConfig
    costs: StepCosts
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    num_replicas: int = 1
    policy: PlacementPolicy = "warm"


class Served(NamedTuple):
    """What became of a request. first_s, total_s: from its arrival; None where it was refused"""

    at_s: float
    output_tokens: int
    first_s: float | None = None
    total_s: float | None = None
    report: PromptReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a case came to. Times are seconds; None where nothing was served.

    tokens_per_s:  generated, from the first arrival to the last end
    prefix_hits:   of the tokens of prompts, the part that was cached;  adapter_hits: of sequences with an adapter,
                   those that found it in a slot; None where no adapter was asked for
    balance:       tokens that the busiest replica computed, over the mean of all
    """

    num_replicas: int
    policy: str
    num_served: int
    num_refused: int
    seconds: float
    tokens_per_s: float
    first_p50: float | None
    first_p99: float | None
    total_p99: float | None
    prefix_hits: float | None = None
    adapter_hits: float | None = None
    balance: float | None = None


def simulate(trace: Sequence[Asked], service: Service, *, num_replicas: int, policy: PlacementPolicy) -> Outcome:
    """Return what would have become of a trace. The same arguments give the same outcome."""

    async def simulated() -> Outcome:
        router = await _played(trace, service, num_replicas, policy)
        outcome = _outcome(router.served, num_replicas=num_replicas, policy=policy, replicas=router.replicas)
        await router.close()
        return outcome

    return _run(simulated())


def policies_of(text: str) -> list[PlacementPolicy]:
    """Return the placements that a text names, with commas or blanks between them. Raises Unusable."""
    known: dict[str, PlacementPolicy] = {name: name for name in get_args(PlacementPolicy)}
    words = text.replace(",", " ").split()
    if unknown := [word for word in words if word not in known]:
        raise Unusable(f"--policy must name {', '.join(known)}; found {unknown[0]!r}")
    return [known[word] for word in words]


def work_of(trace: Sequence[Asked], service: Service) -> Work:
    """Return the work of the steps in which one replica would compute a trace."""

    async def computed() -> Work:
        router = await _played(trace, service, 1, "warm")
        await router.close()
        return router.replicas[0].work

    return _run(computed())


def enough_replicas(
    trace: Sequence[Asked], service: Service, *, policy: PlacementPolicy, target_p99_s: float
) -> Outcome:
    """Return the outcome with the fewest replicas that refuse nothing and keep the target for first tokens.

    Raises Unusable where no number does: the target is shorter than a request takes by itself.
    """

    def is_enough(outcome: Outcome) -> bool:
        return not outcome.num_refused and outcome.first_p99 is not None and outcome.first_p99 <= target_p99_s

    most = 1
    while not is_enough(found := simulate(trace, service, num_replicas=most, policy=policy)):
        most *= 2
        if most > min(MOST_REPLICAS, 2 * len(trace)):
            told = "nothing served" if found.first_p99 is None else f"{found.first_p99:.3g} s"
            raise Unusable(f"no number of replicas keeps a p99 of {target_p99_s:g} s; {most // 2} come to {told}")
    least = most // 2  # is not enough
    while most - least > 1:
        middle = (least + most) // 2
        tried = simulate(trace, service, num_replicas=middle, policy=policy)
        if is_enough(tried):
            most, found = middle, tried
        else:
            least = middle
    return found


def recorded(trace: Sequence[Asked]) -> Outcome:
    """Return what was measured when the trace was recorded. Raises Unusable where it was not."""
    if any(each.first_s is None or each.total_s is None for each in trace):
        raise Unusable("the trace does not say when first tokens and ends came, as lines of the router's log do")
    served = [Served(each.at_s, each.output_tokens, each.first_s, each.total_s) for each in trace]
    return _outcome(served, num_replicas=0, policy="recorded")


def quantile(values: Iterable[float], share: float) -> float | None:
    """Return the least value that so many of all are not above (nearest rank); None of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)] if ordered else None


T = TypeVar("T")


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a virtual clock; in a thread where this one has a loop that runs, as a notebook's has."""

    def run() -> T:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(work)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result()


async def _played(
    trace: Sequence[Asked], service: Service, num_replicas: int, policy: PlacementPolicy
) -> VirtualRouter:
    """Return a router that has served the trace, each request at its time."""
    router = VirtualRouter(service, num_replicas, policy)
    watch = asyncio.create_task(router.greet()) if any(each.adapter for each in trace) else None
    loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[Served]]()
    begin = loop.time()
    for number, asked in enumerate(trace):
        if (wait_s := begin + asked.at_s - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(loop.create_task(router.serve(asked, number)))
    router.served = list(await asyncio.gather(*tasks))
    if watch is not None:
        watch.cancel()
    return router


class Jump(selectors.SelectSelector):
    """Passes the time that it should wait, and never waits: nothing comes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = BEGIN_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits, and nothing is left that could happen")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines on a clock of their own. The same coroutines give the same events every time."""

    def __init__(self) -> None:
        self._jump = Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


class VirtualRouter:
    """A router before so many replicas: the admission, the placement and the links of a real one."""

    def __init__(self, service: Service, num_replicas: int, policy: PlacementPolicy) -> None:
        config, loop, random = service.config, asyncio.get_running_loop(), Random(0)  # nosec B311 # no secret
        model = ModelCard(
            name=config.name, root="", created=0, max_model_len=config.max_model_len or 0, vocab_size=0,
            max_num_sequences=config.max_num_sequences, max_waiting=config.max_waiting,
        )  # fmt: skip
        self._base = config.name
        self.served: list[Served] = []
        self.replicas = [SimulatedReplica(f"replica-{n}", model, config, service.costs) for n in range(num_replicas)]
        self._placement = Placement(policy, random=random)
        self._links = [
            ReplicaLink(cast(Backend, each), each.card, ROUTER_ID, clock=loop.time) for each in self.replicas
        ]
        rooms = dict[str, Room]()
        for link in self._links:
            link.start()
            room = link.room
            assert room is not None, "a replica says what it holds"
            rooms[self._base] = rooms[self._base] + room if rooms else room
        clock, jitter = loop.time, random.random
        self._admission = Admission(lambda: rooms, service.admission, clock=clock, jitter=jitter)
        self._max_tokens = min(self.replicas[0].max_tokens, config.max_model_len or 1 << 62)

    async def serve(self, asked: Asked, number: int) -> Served:
        """Serve one request as a router does; one that is refused does not come again."""
        arrived_at, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
        refused = Served(asked.at_s, asked.output_tokens)
        if asked.input_tokens + asked.output_tokens > self._max_tokens or not asked.output_tokens:
            return refused
        request = asked.request(self._base, number)
        times: list[float] = []
        reports: list[PromptReport] = []
        ended = loop.create_future()

        def receive(delta: Delta) -> None:
            if delta.prompt is not None:
                reports.append(delta.prompt)
                times.append(loop.time() - arrived_at)
            if delta.finish is not None:
                ended.set_result(None)

        try:
            ticket = self._admission.enter(request.share)
        except Overloaded:
            return refused
        completed = dict[str, int]()
        try:
            await ticket.turn()
            ticket.grow({self._base: 1})
            await ticket.turn()
            link, guess = self._placement.begin().choose(request, self._links)
            link.submit([request], receive, [guess])
            await ended
            completed = {self._base: 1}
        except Overloaded:
            return refused
        finally:
            ticket.give_back(completed)
        return Served(asked.at_s, asked.output_tokens, times[0], loop.time() - arrived_at, reports[0])

    async def greet(self) -> None:
        """Hear of the replicas' adapters once a second."""
        while True:
            for replica in self.replicas:
                self._placement.warmth.hear(replica.card)
            await asyncio.sleep(GREETING_S)

    async def close(self) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*(link.close() for link in self._links))


def _outcome(
    served: Sequence[Served], *, num_replicas: int, policy: str, replicas: Sequence[SimulatedReplica] = ()
) -> Outcome:
    done = [each for each in served if each.total_s is not None]
    seconds = max((each.at_s + (each.total_s or 0.0) for each in done), default=0.0)
    firsts = [each.first_s for each in done if each.first_s is not None]
    reports = [each.report for each in done if each.report is not None]
    num_prompt = sum(each.num_tokens for each in reports)
    num_hits, num_loads = sum(each.slots.num_hits for each in replicas), sum(each.slots.num_loads for each in replicas)
    computed = [each.num_computed for each in replicas]
    return Outcome(
        num_replicas=num_replicas,
        policy=policy,
        num_served=len(done),
        num_refused=len(served) - len(done),
        seconds=seconds,
        tokens_per_s=sum(each.output_tokens for each in done) / seconds if seconds else 0.0,
        first_p50=quantile(firsts, 0.5),
        first_p99=quantile(firsts, 0.99),
        total_p99=quantile([each.total_s for each in done if each.total_s is not None], 0.99),
        prefix_hits=sum(each.num_cached_tokens for each in reports) / num_prompt if num_prompt else None,
        adapter_hits=num_hits / (num_hits + num_loads) if num_hits + num_loads else None,
        balance=max(computed) / mean(computed) if any(computed) else None,
    )
