"""Every gap between two tokens of eight well-behaved streams beside hostile ones, in one process: no HTTP, no Ray.

    python benchmarks/bench_gaps.py --model builtin:demo --dtype float32 --rounds 3
    python benchmarks/bench_gaps.py --model random-tiny --only "f ,h " --case-timeout 60
    python benchmarks/bench_gaps.py --model random-tiny --tenants 2

The service with its engine's thread and its event loop, and the requests of `hostile.py` given to it as a router would.
The streams run alone and beside each neighbour by turns (alone, hostile, alone, …); the neighbour is of the same
tenant, or of another one. Prints JSON per case: gaps in
milliseconds as they came out on the event loop, and the steps that lie in the worst of them: what they consisted of,
how long the thread computed, was queued for a CPU (`queued`: other threads and other programs), and was blocked (on
Python's lock, mostly). `own` is from one step's end to the next one's without what it was queued for: the gap that a
quiet machine would see.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, os.environ.get("MEASURED_CHECKOUT", str(Path(__file__).parents[1])))

from benchmarks.hostile import ATTACKS, PAUSE_S, Attack, Target
from benchmarks.poison import CALM, make_adapters
from benchmarks.random_models import model_folder
from benchmarks.watched_engine import Watched, WatchedEngine
from serve_app.catalog.adapters import read_records
from serve_app.core.delta import Delta
from serve_app.core.errors import ServeError
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest, SamplingParams, StopParams
from serve_app.core.shares import Share
from serve_app.deployments.loading import exempt_what_is_loaded, load_replica
from serve_app.engine import driver
from serve_app.engine.config import EngineConfig
from serve_app.replica.service import ModelService

NUM_STREAMS = 8
WARM_TOKENS = 12
NUM_PREPARED = 64
REPOSITORY = Path(__file__).parents[1]
numbers = count()


@dataclass(slots=True, kw_only=True)
class Router:
    """Gives requests to the service and reads its frames; at_s: when each delta with a token came, by request."""

    service: ModelService
    name: str
    at_s: dict[str, list[float]] = field(default_factory=dict)
    endings: dict[tuple[str, int], str] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        async for frame in self.service.attach(self.name):
            now = time.monotonic()
            for delta in frame.deltas:
                self.take(delta, now)
            self.news.set()

    async def stay(self) -> None:
        """Keep the lease, as a router does: without it the service takes this one for dead and ends its streams."""
        while True:
            await self.service.hello(self.name)
            await asyncio.sleep(1)

    def take(self, delta: Delta, now: float) -> None:
        if delta.token_ids:
            self.at_s.setdefault(delta.request_id, []).append(now)
        if delta.error is not None or delta.finish is not None:
            told = type(delta.error).__name__ if delta.error is not None else "ended"
            self.endings[delta.request_id, delta.sample] = told

    async def until(self, is_there: Any) -> None:
        while not is_there():
            self.news.clear()
            await self.news.wait()


def lowered(body: dict[str, Any], versions: dict[str, str]) -> list[GenerationRequest]:
    """The little of a router's work that the bodies of attacks need."""
    base, _, adapter = str(body.get("model", "")).partition(":")
    prompt = body["prompt"]
    prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], list) else [prompt]
    sampling = {
        name: body[name] for name in ("temperature", "top_p", "typical_p", "xtc_probability", "xtc_threshold")
        if name in body
    }  # fmt: skip
    return [
        GenerationRequest(
            request_id="",
            model=ModelRef(base=base or "bench", adapter=adapter or None, version=versions.get(adapter, "")),
            prompt=Prompt(parts=(each if isinstance(each, str) else tuple(each),)),
            prompt_index=index,
            n=body.get("n", 1),
            sampling=SamplingParams(**sampling),
            stop=StopParams(max_tokens=body["max_tokens"], ignore_eos=body.get("ignore_eos", False)),
        )
        for index, each in enumerate(prompts)
    ]


def named(requests: Sequence[GenerationRequest], share: Share) -> list[GenerationRequest]:
    return [replace(each, request_id=f"r{next(numbers)}", share=share) for each in requests]


async def attack(router: Router, case: Case, told: Counter[str]) -> None:
    """The requests of an attack, again and again, until cancelled."""
    turn, attack, prepared = 0, case.attack, case.prepared
    while True:
        chosen = [prepared[(turn + i) % len(prepared)] for i in range(attack.at_once)]
        turn += attack.at_once
        await asyncio.gather(*(one(router, named(requests, case.share), told, attack.is_read) for requests in chosen))
        if not attack.is_read:
            return
        await asyncio.sleep(PAUSE_S)


async def one(router: Router, requests: list[GenerationRequest], told: Counter[str], is_read: bool) -> None:
    try:
        await router.service.submit(router.name, requests)
    except ServeError as refusal:
        told[type(refusal).__name__] += 1
        return
    if is_read:
        keys = [(each.request_id, sample) for each in requests for sample in range(each.n)]
        await router.until(lambda: all(key in router.endings for key in keys))
        told.update(router.endings[key] for key in keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Eight streams, from the moment on which a neighbour may have begun."""

    at_s: list[list[float]]
    steps: list[Watched]
    num_failed: int
    collected_ms: float
    told: Counter[str]

    @property
    def gaps(self) -> list[tuple[float, float, float]]:
        """Milliseconds, from, to."""
        return [((b - a) * 1e3, a, b) for times in self.at_s for a, b in pairwise(times)]

    def within(self, begin: float, end: float) -> list[Watched]:
        """Steps of which some part lies between."""
        return [step for step in self.steps if step.at + step.wall / 1e3 > begin and step.at < end]

    @property
    def own_worst(self) -> Watched:
        """The step that would have been the longest on a quiet machine, from the end of the one before it."""
        return max(self.steps[1:], key=lambda step: step.own)


async def phase(service: ModelService, engine: WatchedEngine, options: argparse.Namespace, case: Case | None) -> Phase:
    router = Router(service=service, name=f"calm-{next(numbers)}")
    own = [asyncio.create_task(router.read()), asyncio.create_task(router.stay())]
    await asyncio.sleep(0)
    mine = [request for number in range(NUM_STREAMS) for request in named(innocent(number, options), Share())]
    engine.steps.clear()
    engine.collections.worst_ms = 0.0
    await service.submit(router.name, mine)
    ids = [request.request_id for request in mine]
    await router.until(lambda: all(len(router.at_s.get(id_, ())) >= WARM_TOKENS for id_ in ids) or router.endings)
    began, told = time.monotonic(), Counter[str]()
    tasks = case.begin(service, told) if case is not None else []
    await router.until(lambda: len(router.endings) == len(ids))
    for task in (*tasks, *own):
        task.cancel()
    await asyncio.gather(*tasks, *own, return_exceptions=True)
    if case is not None:
        service._delivery.detach(case.router_name)
    service._delivery.detach(router.name)
    steps = list(engine.steps)
    while engine.has_work or service.num_open:  # noqa: ASYNC110, the engine runs in another thread
        await asyncio.sleep(0.05)
    return Phase(
        at_s=[[at for at in router.at_s[id_] if at >= began] for id_ in ids],
        steps=[step for step in steps if step.at >= began],
        num_failed=sum(told != "ended" for told in router.endings.values()),
        collected_ms=engine.collections.worst_ms,
        told=told,
    )


@dataclass(slots=True, kw_only=True)
class Case:
    """An attack whose requests are made already."""

    attack: Attack
    prepared: list[list[GenerationRequest]]
    share: Share
    router_name: str = ""

    def begin(self, service: ModelService, told: Counter[str]) -> list[asyncio.Task[None]]:
        self.router_name = f"hostile-{next(numbers)}"
        router = Router(service=service, name=self.router_name)
        tasks = [attack(router, self, told), router.stay()]
        if self.attack.is_read:
            tasks.append(router.read())
        return [asyncio.create_task(task) for task in tasks]


def innocent(number: int, options: argparse.Namespace) -> list[GenerationRequest]:
    model = f"bench:{CALM}" if number % 4 == 3 else "bench"
    body = {
        "model": model, "prompt": f"Story {number}: once upon a time", "max_tokens": options.tokens,
        "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    return lowered(body, options.versions)


def judged(name: str, quiet: Sequence[Phase], hostile: Sequence[Phase]) -> dict[str, Any]:
    calm = [gap[0] for each in quiet for gap in each.gaps]
    step = statistics.median(calm)
    gaps = sorted(gap[0] for each in hostile for gap in each.gaps)
    worst = [max(each.gaps) for each in hostile]
    own = [step.own for each in hostile for step in each.steps[1:]]
    own_alone = statistics.median(step.own for each in quiet for step in each.steps[1:])
    own_worst = [each.own_worst.own for each in hostile]
    which = max(range(len(worst)), key=lambda index: worst[index][0])
    median = statistics.median(gaps)
    return {
        "case": name,
        "median_alone": round(step, 2),
        "median": round(median, 2),
        "p99": round(gaps[len(gaps) * 99 // 100], 1),
        "worst": [round(gap[0], 1) for gap in worst],
        "worst_alone": [round(max(each.gaps)[0], 1) for each in quiet],
        "own_median_alone": round(own_alone, 2),
        "own_median": round(statistics.median(own), 2),
        "own_p99": round(sorted(own)[len(own) * 99 // 100], 1),
        "own_worst": [round(each, 1) for each in own_worst],
        "own_worst_alone": [round(each.own_worst.own, 1) for each in quiet],
        "own_worst/alone": round(statistics.median(own_worst) / own_alone, 2),
        "own_worst/median": round(statistics.median(own_worst) / statistics.median(own), 2),
        "failed": sum(each.num_failed for each in hostile),
        "collected": [round(each.collected_ms, 1) for each in hostile],
        "told": dict(sum((each.told for each in hostile), Counter())),
        "steps_of_worst": [each.as_dict() for each in hostile[which].within(*worst[which][1:])],
        "own_worst_steps": [each.own_worst.as_dict() for each in hostile],
    }


def load(options: argparse.Namespace, scratch: Path) -> tuple[ModelService, WatchedEngine, Target]:
    is_demo = options.model == "builtin:demo"
    folder = REPOSITORY / "serve_app/demo/model" if is_demo else model_folder(options.model, scratch)
    make_adapters(folder, scratch / "adapters")
    records = read_records(scratch / "adapters")
    options.versions = {each.name: each.version for each in records}
    config = EngineConfig(
        name="bench", path=str(folder), dtype=options.dtype, threads=options.threads,
        kv_cache_bytes=options.kv_mib << 20, max_num_sequences=options.sequences, max_adapters=2,
    )  # fmt: skip
    if options.stretch is not None:
        config = replace(config, max_step_stretch=options.stretch)
    driver.Engine = WatchedEngine  # type: ignore[misc]
    service = load_replica(config, records, replica_id="r1")
    assert isinstance(service.engine, driver.ReplicaEngine)
    engine = service.engine.core
    assert isinstance(engine, WatchedEngine)
    vocab = min(256, engine.model.vocab_size)
    return service, engine, Target(port=0, model="bench", context=engine.model.max_model_len, ids=vocab)


async def compare(options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    service, engine, target = load(options, scratch)
    if not options.collect_all:
        exempt_what_is_loaded()
    service.start()
    results = []
    await phase(service, engine, options, None)
    for name, each in ATTACKS.items():
        if not name.startswith(tuple(options.only.split(","))):
            continue
        size = max(NUM_PREPARED, each.at_once) if name[0] != "c" else each.at_once
        bodies = [lowered(each.body(target, number), options.versions) for number in range(size)]
        case = Case(attack=each, prepared=bodies, share=Share() if options.tenants == 1 else Share(flow="another"))
        quiet, hostile = [], []
        try:
            async with asyncio.timeout(options.case_timeout):
                for _ in range(options.rounds):
                    quiet.append(await phase(service, engine, options, None))
                    hostile.append(await phase(service, engine, options, case))
        except TimeoutError:
            results.append({"case": name, "timeout": options.case_timeout, "rounds": len(hostile)})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            break  # what it left behind would be measured with the next
        results.append(judged(name, quiet, hostile))
        print(json.dumps(results[-1]), flush=True)
    await service.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-tiny", help="a folder, builtin:demo, or the shape of a random one")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-mib", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=160, help="of each of the eight streams")
    parser.add_argument("--stretch", type=float, help="max_step_stretch, where it is another one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tenants", type=int, default=1, choices=(1, 2), help="2: the neighbour is another one")
    parser.add_argument("--only", default="", help="how the names of the cases begin, with commas between")
    parser.add_argument("--case-timeout", type=float, default=120.0, help="seconds for all rounds of a case")
    parser.add_argument("--collect-all", action="store_true", help="let Python's collector look at what is loaded, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(compare(options, Path(scratch)))


if __name__ == "__main__":
    main()
