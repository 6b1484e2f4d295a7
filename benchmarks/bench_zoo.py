"""What hostile inputs are answered, how soon, and what eight innocent streams on the same replica see of it.

    python -m benchmarks.bench_zoo [--rounds 2] [--words 32000] [--only image,honest]

Starts the service with one replica of a small random model that sees, sends every animal of the zoo alone while eight
streams go on, and prints a table: status, seconds until the answer, and gaps between tokens of the streams from the
moment it is sent until it is answered, beside those of the moments between animals. A gap is counted where it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.service import Service, first_token, running_service
from benchmarks.sighted_model import make_sighted
from benchmarks.zoo import Animal, animals, template

NAME = "bench"
NUM_STREAMS = 8
NUM_TOKENS = 600
PAUSE_S = 0.6
TIMEOUT_S = 240.0
BEHIND_S = 0.05
COLUMNS = ("kind", "animal", "status", "seconds", "gaps: median ms", "worst ms", "worst / median alone")


@dataclass(slots=True, kw_only=True)
class Gaps:
    """Between tokens of all streams: when each ended, and milliseconds."""

    found: list[tuple[float, float]] = field(default_factory=list)

    def within(self, began: float, ended: float) -> list[float]:
        return [ms for at, ms in self.found if began <= at <= ended]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One animal, once."""

    status: int
    seconds: float
    gaps_ms: list[float]
    said: str


async def stream(port: int, number: int, gaps: Gaps) -> None:
    """One stream after another, for good."""
    body = json.dumps({
        "model": NAME, "prompt": f"Story {number}: once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True,
        "temperature": 0, "stream": True, "return_token_ids": True,
    }).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + body)
        before = None
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if before is not None:
                    gaps.found.append((now, (now - before) * 1e3))
                before = now
        writer.close()


def send(port: int, animal: Animal) -> tuple[int, str, float, float]:
    """Status, what was said, when it was sent and when it was answered; in a process of its own."""
    content = json.dumps(animal.body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{animal.path}", data=content, headers={"content-type": "application/json"}
    )
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            status, said = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, said = error.code, error.read()
    return status, said.decode()[:300], began, time.monotonic()


async def watch(service: Service, options: argparse.Namespace) -> tuple[dict[tuple[str, str], list[Seen]], list[float]]:
    """What was seen of each animal, and the gaps between them."""
    gaps, seen, alone = Gaps(), defaultdict(list), list[float]()
    streams = [asyncio.create_task(stream(service.port, number, gaps)) for number in range(NUM_STREAMS)]
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for number in range(options.rounds):
            zoo = await loop.run_in_executor(None, list, animals(NAME, number + 1))
            for animal in zoo:
                if not animal.kind.startswith(tuple(options.only.split(","))):
                    continue
                rests = time.monotonic()
                await asyncio.sleep(PAUSE_S)
                alone += gaps.within(rests + PAUSE_S / 2, time.monotonic())
                status, said, began, ended = await loop.run_in_executor(pool, send, service.port, animal)
                await asyncio.sleep(BEHIND_S)
                found = gaps.within(began, ended + BEHIND_S)
                each = Seen(status=status, seconds=ended - began, gaps_ms=found, said=said)
                seen[animal.kind, animal.name].append(each)
                print(
                    f"{animal.kind}, {animal.name}: {status}, {each.seconds:.2f} s, {max(found, default=0.0):.1f} ms",
                    flush=True,
                )
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return seen, alone


def table(seen: dict[tuple[str, str], list[Seen]], alone: list[float]) -> str:
    step = statistics.median(alone)
    lines: list[tuple[object, ...]] = [COLUMNS, ("---",) * len(COLUMNS)]
    lines.append(("", "between animals", "", "", f"{step:.1f}", f"{max(alone):.1f}", f"{max(alone) / step:.1f}"))
    for (kind, name), times in seen.items():
        gaps = [ms for each in times for ms in each.gaps_ms]
        worst = statistics.median(max(each.gaps_ms, default=0.0) for each in times)
        status = " ".join(sorted({str(each.status) for each in times}))
        seconds = max(each.seconds for each in times)
        median = statistics.median(gaps) if gaps else 0.0
        lines.append((kind, name, status, f"{seconds:.2f}", f"{median:.1f}", f"{worst:.1f}", f"{worst / step:.1f}"))
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="worst gaps are the median of the rounds' worst")
    parser.add_argument("--words", type=int, default=32_000, help="of the vocabulary")
    parser.add_argument("--only", default="", help="how the kinds begin, with commas between")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        process = multiprocessing.get_context("spawn").Process(target=make_sighted, args=(Path(scratch), options.words))
        process.start()
        process.join()
        assert process.exitcode == 0, "the model could not be made"
        arguments = {
            "name": NAME, "path": scratch, "dtype": "float32", "threads": 1, "kv_cache_bytes": 512 << 20,
            "max_num_sequences": 32, "chat_template": template(),
        }  # fmt: skip
        with running_service() as service:
            service.deploy(arguments)
            first_token(service.url, NAME)
            seen, alone = asyncio.run(watch(service, options))
    print(table(seen, alone))
    for (kind, name), times in seen.items():
        print(f"{kind}, {name}: {times[-1].said}")


if __name__ == "__main__":
    main()
