"""Batches whose service is killed part by part, and what batches and interactive requests take from each other.

    python -m benchmarks.bench_batches kills --lines 10000 [--postgresql]
    python -m benchmarks.bench_batches tokens --lines 200 --max-tokens 16 --model build/bench/bench-0.5b
    python -m benchmarks.bench_batches first-token --lines 2000 --max-tokens 64 --model build/bench/bench-0.5b

Each starts a service of its own with keys, and prints JSON.

kills:       two routers and two replicas. While a batch runs, kills a router, a replica, Accounts, and then everything,
             `serve_app up` among it, which begins anew in the same folder. Compares what each line was answered with
             the ledger, and a sample with direct requests. Exits with 1 where anything is wrong. With --postgresql a
             server of its own has the store, which `everything` leaves alone. In the end of a round it breaks off, too.
tokens:      tokens per second of a batch beside those of the same requests from as many clients as keep the service
             busy, in turns.
first-token: seconds that a request for one token takes, which comes every so often, with a batch and without, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import openai

from benchmarks.load import Answer, ask, drive, session_with
from serve_app.cli.processes import send
from tests.agreement import TOKENS, Asked, disagreements, kept_in
from tests.chaos.beds import TITLES
from tests.cluster.house import House, with_keys
from tests.cluster.kills import begun, with_two_of_each
from tests.tenants.postgres import Server, folder_of_programs

PATH = "/v1/completions"
KILLS = ("router", "model replica", "Accounts", "everything")
STORE, STORE_PAUSE_S = "PostgreSQL", 10.0
ENDED = ("completed", "failed", "expired", "cancelled")
NUM_COMPARED = 50
NUM_BEHIND = 100
"""Lines that are answered after a kill before it counts as over; some were on their way."""
PATIENCE_S = 120.0
POLL_S, MAX_POLL_S = 0.1, 2.0

Bodies = list[dict[str, Any]]
Batch = openai.types.Batch
Keys = dict[str, str]


class Batches:
    """What a tenant does with batches. Its client repeats a call as long as a service needs to begin."""

    def __init__(self, url: str, key: str) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=30)

    def begin(self, bodies: Bodies) -> str:
        of_all = {"method": "POST", "url": PATH}
        lines = [json.dumps(of_all | {"custom_id": str(at), "body": body}) for at, body in enumerate(bodies)]
        file = self.client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
        return self.client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h").id

    def until(self, batch_id: str, holds: Callable[[Batch], bool]) -> Batch:
        """As soon as it holds, or the batch has ended."""
        while not holds(batch := self.client.batches.retrieve(batch_id)) and batch.status not in ENDED:
            time.sleep(POLL_S)
        return batch

    def answers(self, batch: Batch) -> list[dict[str, Any]]:
        """Every line of both files."""
        files = [each for each in (batch.output_file_id, batch.error_file_id) if each]
        return [json.loads(line) for each in files for line in self.client.files.content(each).text.splitlines()]


def bodies_of(number: int, max_tokens: int, name: str) -> Bodies:
    """Requests of one shape, of which none shares a prompt with one of another name."""
    asked = {"model": "demo", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return [asked | {"prompt": f"{name}, story {each}: once upon a time"} for each in range(number)]


def num_done(batch: Batch) -> int:
    counts = batch.request_counts
    return counts.completed + counts.failed if counts else 0


def with_kills(house: House, keys: Keys, options: argparse.Namespace) -> dict[str, Any]:
    parts = (*KILLS, *([STORE] if options.server else [])) * options.rounds
    bodies, kills = bodies_of(options.lines, options.max_tokens, "killed"), []
    batches, began_at = Batches(house.run.url, keys["acme"]), time.monotonic()
    batch_id = batches.begin(bodies)
    for number, part in enumerate(parts, start=1):
        due = len(bodies) * number // (len(parts) + 1)
        before = num_done(batches.until(batch_id, lambda batch, due=due: num_done(batch) >= due))
        at = time.monotonic()
        kill(house, part, options.server)
        batches.until(batch_id, lambda batch, before=before: num_done(batch) > before + NUM_BEHIND)
        kills.append({"part": part, "behind": before, "paused_s": round(time.monotonic() - at, 1)})
    batch = batches.until(batch_id, lambda batch: False)
    told = {"lines": len(bodies), "seconds": round(time.monotonic() - began_at), "status": batch.status}
    return {**told, "kills": kills, **compared(house, batches, batch, bodies, num_kills=len(kills))}


def kill(house: House, part: str, server: Server | None) -> None:
    """By SIGKILL: one process of the part, or everything, which begins anew then. The store is away for a while."""
    if part == STORE and server:
        server.begin_anew(STORE_PAUSE_S)
        return
    if part not in TITLES:
        house.run.start_anew()
        return
    found = [each for each in house.run.processes() if each.command.startswith(TITLES[part])]
    send(found[0], signal.SIGKILL)


def compared(house: House, batches: Batches, batch: Batch, bodies: Bodies, *, num_kills: int) -> dict[str, Any]:
    """What the files say beside the input, direct requests and the ledger. wrong: nothing, where all agree"""
    answers = batches.answers(batch)
    times = Counter(answer["custom_id"] for answer in answers)
    wrong = [f"line {each} is there {times[str(each)]} times" for each in range(len(bodies)) if times[str(each)] != 1]
    wrong += [str(answer) for answer in answers if answer["response"]["status_code"] != HTTPStatus.OK]
    for answer in random.Random(0).sample(answers, min(NUM_COMPARED, len(answers))):
        direct = house.ask("POST", PATH, batches.client.api_key, bodies[int(answer["custom_id"])]).json()
        if direct["choices"][0]["text"] != answer["response"]["body"]["choices"][0]["text"]:
            wrong.append(f"line {answer['custom_id']} differs from a direct request")
    asked = [asked_of(answer, num_kills) for answer in answers]
    deadline = time.monotonic() + PATIENCE_S
    while (not_exact := disagreements(kept_in(house.store), asked)) and time.monotonic() < deadline:
        time.sleep(1.0)  # replicas tell what they computed
    kept, usage = kept_in(house.store), batch.usage
    rows = [row for name, found in kept.rows.items() if name.startswith("batch_req_") for row in found]
    sums = [sum(row[name] for row in rows) for name in TOKENS]
    if usage is None or sums != [usage.input_tokens, usage.output_tokens]:
        wrong.append(f"the batch says {usage} and its rows {sums}")
    vain = {name: kept.unattributed.get("acme", Counter())[name] for name in TOKENS}
    wrong += not_exact
    told = {"answers": len(answers), "rows": len(rows), "tokens": sums, "computed in vain": vain}
    return {**told, "wrong": [len(wrong), *wrong[:5]]}


def asked_of(answer: dict[str, Any], num_kills: int) -> Asked:
    usage = answer["response"]["body"]["usage"]
    tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return Asked(name=answer["id"], tenant="acme", most=tokens, usage=tokens, num_lost=num_kills)


def tokens_in_turns(house: House, keys: Keys, options: argparse.Namespace) -> dict[str, Any]:
    batches, told = Batches(house.run.url, keys["acme"]), {"batch": list[float](), "clients": list[float]()}

    def by_batch(bodies: Bodies) -> float:
        batch_id = batches.begin(bodies)
        batches.until(batch_id, lambda batch: batch.status == "in_progress")
        began_at = time.monotonic()
        while (done := num_done(batches.client.batches.retrieve(batch_id))) < len(bodies):
            passed = time.monotonic() - began_at  # who asks each tenth of a second takes a tenth of two cores
            time.sleep(min(MAX_POLL_S, max(POLL_S, passed * (len(bodies) - done) / max(done, 1) / 2)))
        return len(bodies) * options.max_tokens / (time.monotonic() - began_at)

    def by_clients(bodies: Bodies) -> float:
        began_at = time.monotonic()
        answers = asyncio.run(drive(house.run.url, bodies, concurrency=options.concurrency, key=keys["acme"]))
        assert not (errors := {each.error for each in answers} - {None}), errors
        return sum(each.output_tokens for each in answers) / (time.monotonic() - began_at)

    for number in range(options.rounds):
        turns = [("batch", by_batch), ("clients", by_clients)]
        for name, measure in turns[:: 1 - 2 * (number % 2)]:
            told[name].append(round(measure(bodies_of(options.lines, options.max_tokens, f"{name} {number}")), 1))
    ratios = [round(batch / clients, 3) for batch, clients in zip(told["batch"], told["clients"], strict=True)]
    return {"tokens per second": told, "ratio": ratios}


def first_tokens_in_turns(house: House, keys: Keys, options: argparse.Namespace) -> dict[str, Any]:
    batches, told = Batches(house.run.url, keys["acme"]), {"alone": list[float](), "beside a batch": list[float]()}
    num_lines = 0
    for number in range(options.rounds):
        told["alone"] += first_tokens(house.run.url, keys["beta"], options)
        with running(batches, bodies_of(options.lines, options.max_tokens, f"round {number}")) as batch_id:
            told["beside a batch"] += first_tokens(house.run.url, keys["beta"], options)
            num_lines += num_done(batches.client.batches.retrieve(batch_id))
    cuts = {name: statistics.quantiles(each, n=100, method="inclusive") for name, each in told.items()}
    seconds = {name: {"p50": round(each[49], 3), "p95": round(each[94], 3)} for name, each in cuts.items()}
    ratio = {q: round(seconds["beside a batch"][q] / seconds["alone"][q], 2) for q in ("p50", "p95")}
    return {"first token, seconds": seconds, "ratio": ratio, "lines computed meanwhile": num_lines}


@contextmanager
def running(batches: Batches, bodies: Bodies) -> Iterator[str]:
    """A batch that computes, and is cancelled in the end."""
    batch_id = batches.begin(bodies)
    batches.until(batch_id, lambda batch: num_done(batch) > 0)
    yield batch_id
    assert batches.client.batches.retrieve(batch_id).status == "in_progress", "the batch ended meanwhile: more --lines"
    batches.client.batches.cancel(batch_id)
    batches.until(batch_id, lambda batch: False)


def first_tokens(url: str, key: str, options: argparse.Namespace) -> list[float]:
    """One request for a token each `interval` seconds, whether those before have ended or not."""

    async def all_of_them() -> list[Answer]:
        async with session_with(key) as session, asyncio.TaskGroup() as group:
            tasks = []
            for _ in range(options.requests):
                prompt = [random.randrange(10, 250) for _ in range(options.prompt)]
                body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
                tasks.append(group.create_task(ask(session, url, body)))
                await asyncio.sleep(options.interval)
        return [task.result() for task in tasks]

    answers = asyncio.run(all_of_them())
    assert not (errors := {each.error for each in answers} - {None}), errors
    return [each.ended_at - each.sent_at for each in answers]


@contextmanager
def running_server() -> Iterator[Server]:
    programs = folder_of_programs()
    assert programs is not None, "PostgreSQL is not installed"
    server = Server(programs)
    try:
        yield server
    finally:
        server.end()


MEASURES = {"kills": with_kills, "tokens": tokens_in_turns, "first-token": first_tokens_in_turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--model", help="folder of another model than the demo")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="of kills, or of turns")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=20, help="for a token, in each turn")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds from one to the next")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each")
    parser.add_argument("--postgresql", action="store_true", help="the store is there, not in a file")
    options = parser.parse_args()

    def changed(content: dict[str, Any]) -> None:
        with_two_of_each(content) if options.what == "kills" else with_keys(content)
        if options.server:
            content["applications"][0]["args"]["store"] = options.server.new_database()
        content["applications"][0]["deployments"][0]["user_config"] |= {"max_wait_s": 600, "max_open_requests": 512}
        if options.model:
            more = {"path": str(Path(options.model).absolute()), "dtype": "bfloat16", "threads": 2}
            content["applications"][1]["args"] |= more

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        options.server = stack.enter_context(running_server()) if options.postgresql else None
        house, _, keys = begun(Path(folder), changed)
        try:
            told = MEASURES[options.what](house, keys, options)
            print(json.dumps(told, indent=1))
        finally:
            house.run.end()
    sys.exit(bool(told.get("wrong", [0])[0]))


if __name__ == "__main__":
    main()
