"""What fairness costs and what it gives, on the clock: the same requests in twenty flows and in one, by turns.

    python benchmarks/bench_fairness.py --model serve_app/demo/model --rounds 5

Nineteen flows ask now and then, one asks for far more than there is. In one flow all of them are served first come,
first served. Prints JSON: tokens per second of either and their ratio by rounds, when the others had their first token,
what the policy itself takes per step with so many that wait and so many flows, and how long a short question waits
beside a long job that has every place, where the job gives one (what it computed is cached) and where it does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[1]))

from serve_app.core.shares import Share
from serve_app.engine.engine import Engine
from serve_app.engine.scheduler.accounting import attribute
from tests.engine.harness import config, make_engine, request, sequences
from tests.engine.simulated import Simulation, percentile

NUM_FLOWS = 20
NUM_GREEDY = 160
EVERY_STEPS = 2
"""One of the other flows, in their order, asks."""
NUM_ASKED = 60
PROMPT, TOKENS = 48, 16


@dataclass(slots=True)
class Round:
    """first_s: from asking to the first token, of the flows that are not greedy;  cpu_s: of the thread that steps"""

    seconds: float = 0.0
    cpu_s: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    first_s: list[float] = field(default_factory=list)


def play(engine: Engine, number: int, *, is_fair: bool) -> Round:
    """All that the greedy flow wants at once, then the others between steps; until everything is done."""
    found, asked_at = Round(), dict[str, float]()

    def ask(flow: str, index: int) -> None:
        name = f"{flow}-{index}-{number}-{is_fair}"
        asked = replace(request(name, max_tokens=TOKENS), share=Share(flow=flow) if is_fair else Share())
        prompt = [20 + (7 * index + 31 * place + len(flow)) % 900 for place in range(PROMPT)]
        engine.add(sequences(engine, asked, prompt))
        asked_at[name] = time.perf_counter()

    began_at, cpu_began_at = time.perf_counter(), time.thread_time()
    for index in range(NUM_GREEDY):
        ask("greedy", index)
    num_asked = 0
    while engine.has_work:
        if found.num_steps % EVERY_STEPS == 0 and num_asked < NUM_ASKED:
            ask(f"f{num_asked % (NUM_FLOWS - 1)}", num_asked)
            num_asked += 1
        deltas, now = engine.step(), time.perf_counter()
        found.num_steps += 1
        for delta in deltas:
            found.num_tokens += len(delta.token_ids)
            is_first = delta.token_ids and delta.request_id in asked_at
            if is_first and not delta.request_id.startswith("greedy"):
                found.first_s.append(now - asked_at[delta.request_id])
            if is_first:
                del asked_at[delta.request_id]
    found.seconds, found.cpu_s = time.perf_counter() - began_at, time.thread_time() - cpu_began_at
    return found


def policy_us(num_flows: int, *, num_waiting: int = 1000, num_steps: int = 60) -> dict[str, float]:
    """Microseconds per step of 64 sequences: to schedule it, and to charge it."""
    simulation = Simulation(num_places=64, num_blocks=100_000, max_batch_tokens=512)
    times: list[tuple[float, float]] = []
    for _ in range(num_steps):
        while len(simulation.waiting) < num_waiting:
            simulation.ask(Share(flow=f"f{len(simulation.stories) % num_flows}"), 40, 12)
        began = time.perf_counter()
        batch = simulation.scheduler.schedule()
        planned = time.perf_counter()
        attribute(batch, simulation.policy, simulation.accounts, since_ns=simulation.accounts.now_ns())
        times.append((planned - began, time.perf_counter() - planned))
        simulation.compute(batch)
    schedule, charged = zip(*times[10:], strict=True)
    return {"schedule": statistics.median(schedule) * 1e6, "charge": statistics.median(charged) * 1e6}


def question_s(model: str, *, gives: bool) -> dict[str, float]:
    """From asking to the first token, seconds and steps, when the job's texts have a tenth of their length."""
    engine = make_engine(config(model, max_num_sequences=16, max_batch_tokens=256, prefix_cache=gives))
    job = replace(request("job", max_tokens=300), share=Share(flow="job"))
    job = replace(job, stop=replace(job.stop, ignore_eos=True))
    for number in range(16):
        prompt = [20 + (7 * number + 31 * place) % 900 for place in range(PROMPT)]
        engine.add(sequences(engine, replace(job, request_id=f"job{number}"), prompt))
    for _ in range(40):
        engine.step()
    asked = replace(request("question", max_tokens=8), share=Share(flow="asks"))
    engine.add(sequences(engine, asked, [20 + place for place in range(12)]))
    began, num_before = time.perf_counter(), engine.num_steps
    while not any(delta.request_id == "question" for delta in engine.step()):
        pass
    found = {"s": round(time.perf_counter() - began, 4), "steps": engine.num_steps - num_before}
    engine.close()
    return found


def figures(rounds: list[tuple[Round, Round]]) -> dict[str, object]:
    """rounds: each in twenty flows and in one"""
    rates = [[each.num_tokens / each.seconds for each in pair] for pair in rounds]
    return {
        "tokens/s, flows": statistics.median(fair for fair, _ in rates),
        "tokens/s, first come": statistics.median(first for _, first in rates),
        "flows/first come": sorted(round(fair / first, 3) for fair, first in rates),
        "flows/first come, by the thread's processor time": sorted(
            round(first.cpu_s / fair.cpu_s * fair.num_tokens / first.num_tokens, 3) for fair, first in rounds
        ),
        "steps": [each.num_steps for each in rounds[0]],
        "others' p95 to first token, s, flows": statistics.median(percentile(fair.first_s, 95) for fair, _ in rounds),
        "others' p95 to first token, s, first come": statistics.median(percentile(f.first_s, 95) for _, f in rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="serve_app/demo/model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefix-cache", action="store_true", help="so that places are given, too")
    options = parser.parse_args()
    settings = config(options.model, max_num_sequences=16, max_batch_tokens=256, prefix_cache=options.prefix_cache)
    engine = make_engine(settings)
    play(engine, -1, is_fair=True)
    rounds = []
    for number in range(options.rounds):
        pair = {
            is_fair: play(engine, number, is_fair=is_fair) for is_fair in ((True, False), (False, True))[number % 2]
        }
        rounds.append((pair[True], pair[False]))
    engine.close()
    waits = {name: question_s(options.model, gives=gives) for name, gives in (("given", True), ("not", False))}
    told = (
        figures(rounds)
        | {"a question beside a job, a place is": waits}
        | {"policy, us per step": {str(flows): policy_us(flows) for flows in (1, 8, 64)}}
    )
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
