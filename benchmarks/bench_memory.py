"""What a replica's process takes in memory, at rest and under mixed requests, and how soon its first token comes.

    python benchmarks/bench_memory.py --model random-0.5b --kv-mib 2048,256
    python benchmarks/bench_memory.py --model /models/some-folder --kv-mib 1024

Starts the service for each budget, deploys the model to it, and reads /proc (Linux). Prints JSON, then a table, in
MB of 10^6 bytes. The bound is weights + kv_cache_bytes + 700 MB, the weights counted once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.random_models import model_folder
from benchmarks.service import Service, first_token, running_service

ALLOWED_BYTES = 700_000_000
NAME = "bench"
WATCH_S = 0.05
REST_S = 3.0
RESET_PEAK = "5"  # proc(5), clear_refs
COLUMNS = (
    "kv", "start_s", "weights", "loading", "idle", "peak", "after", "held", "beyond held", "peak beyond",
    "within", "answers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Memory:
    """Bytes in memory of a process; `file` is what is mapped of files and can be dropped."""

    total: int
    anon: int
    file: int

    def in_mb(self) -> dict[str, int]:
        return {"total": self.total // 10**6, "anon": self.anon // 10**6, "file": self.file // 10**6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Makes the mixed requests.

    long:   tokens of a long prompt;  vocab: ids that prompts are drawn from
    """

    long: int
    vocab: int
    max_tokens: int

    def body(self, number: int) -> dict[str, Any]:
        """Short, long, several completions, a stream to be dropped, a repeated prefix: by turns."""
        drawn = random.Random(number)
        prefix = self._ids(random.Random(-1), self.long // 2)
        body = {"model": NAME, "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}
        match number % 5:
            case 0:
                return body | {"prompt": self._ids(drawn, 16)}
            case 1:
                return body | {"prompt": self._ids(drawn, self.long)}
            case 2:
                return body | {"prompt": self._ids(drawn, 64), "n": 4, "temperature": 1, "seed": number}
            case 3:
                return body | {"prompt": self._ids(drawn, 200), "stream": True}
            case _:
                return body | {"prompt": prefix + self._ids(drawn, 32)}

    def _ids(self, drawn: random.Random, count: int) -> list[int]:
        return [drawn.randrange(3, self.vocab) for _ in range(count)]


async def send(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """What became of it; a stream is dropped after a few events."""
    if not body.get("stream"):
        response = await client.post("/v1/completions", json=body)
        return str(response.status_code)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        num_events = 0
        async for line in response.aiter_lines():
            num_events += line.startswith("data: ")
            if num_events == 4:
                return "dropped"
        return f"{response.status_code} ended"


async def send_all(url: str, mix: Mix, *, num_requests: int, num_connections: int) -> Counter[str]:
    answers: Counter[str] = Counter()
    gate = asyncio.Semaphore(num_connections)
    limits = httpx.Limits(max_connections=num_connections)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        async with gate:
            answers[await send(client, mix.body(number))] += 1

    async with httpx.AsyncClient(base_url=url, timeout=900, limits=limits) as client:
        await asyncio.gather(*(one(client, number) for number in range(num_requests)))
    return answers


def memory_of(pid: int) -> Memory:
    sizes = _status(pid)
    file = sizes["RssFile"] + sizes["RssShmem"]
    return Memory(total=sizes["VmRSS"], anon=sizes["RssAnon"], file=file)


def peak_of(pid: int) -> int:
    """Bytes at most in memory since `forget_peak`, or since the process began."""
    return _status(pid)["VmHWM"]


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)


def _status(pid: int) -> dict[str, int]:
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


@asynccontextmanager
async def watched(pid: int) -> AsyncIterator[list[Memory]]:
    """Looks again and again; what was seen is there when the block has ended."""
    seen = [memory_of(pid)]

    async def watch() -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            seen.append(memory_of(pid))

    watcher = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        watcher.cancel()


async def measure(service: Service, arguments: dict[str, Any], mix: Mix, options: argparse.Namespace) -> dict[str, Any]:
    began_at = time.monotonic()
    service.deploy(arguments)
    start_s = await asyncio.to_thread(first_token, service.url, NAME) - began_at
    await asyncio.sleep(REST_S)
    pid = service.replica_pid(NAME)
    loading, idle = peak_of(pid), memory_of(pid)
    forget_peak(pid)
    began_at = time.monotonic()
    async with watched(pid) as seen:
        answers = await send_all(service.url, mix, num_requests=options.requests, num_connections=options.connections)
    requests_s = time.monotonic() - began_at
    await asyncio.sleep(REST_S)
    weights = num_weights(Path(arguments["path"])) * getattr(torch, arguments["dtype"]).itemsize
    after, held = memory_of(pid), await asyncio.to_thread(bytes_held, service.url)
    peak = max(peak_of(pid), max(seen).total)
    beyond = peak - weights - arguments["kv_cache_bytes"]
    return {
        "kv_cache_mb": arguments["kv_cache_bytes"] // 10**6,
        "weights_mb": weights // 10**6,
        "first_token_after_s": round(start_s, 1),
        "requests_s": round(requests_s, 1),
        "loading_peak_mb": loading // 10**6,
        "idle_mb": idle.in_mb(),
        "peak_mb": peak // 10**6,
        "seen_peak_mb": max(seen).in_mb(),
        "after_mb": after.in_mb(),
        "kv_held_after_mb": held // 10**6,
        "after_beyond_weights_and_held_mb": (after.total - weights - held) // 10**6,
        "peak_beyond_weights_and_kv_mb": beyond // 10**6,
        "is_within_bound": beyond <= ALLOWED_BYTES,
        "answers": dict(answers),
    }


def bytes_held(url: str) -> int:
    """Of keys and values, running and cached, as `/metrics` tells."""
    text = httpx.get(f"{url}/metrics").raise_for_status().text
    states = re.findall(r'^serve_app_replica_kv_bytes\{.*state="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return sum(int(float(size)) for state, size in states if state in ("used", "cached"))


def num_weights(folder: Path) -> int:
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            count += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return count


def table(results: list[dict[str, Any]]) -> str:
    def split(memory: dict[str, int]) -> str:
        return f"{memory['total']} ({memory['anon']} + {memory['file']})"

    lines = [
        (
            each["kv_cache_mb"], each["first_token_after_s"], each["weights_mb"], each["loading_peak_mb"],
            split(each["idle_mb"]), f"{each['peak_mb']}, seen {split(each['seen_peak_mb'])}", split(each["after_mb"]),
            each["kv_held_after_mb"], each["after_beyond_weights_and_held_mb"],
            each["peak_beyond_weights_and_kv_mb"], "yes" if each["is_within_bound"] else "NO",
            " ".join(f"{kind}: {count}" for kind, count in sorted(each["answers"].items())),
        )
        for each in results
    ]  # fmt: skip
    head = "MB, total (anonymous + of files)\n\n"
    return head + "\n".join(f"| {' | '.join(map(str, line))} |" for line in (COLUMNS, ("---",) * len(COLUMNS), *lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-0.5b", help="a folder, random-0.5b or random-1b")
    parser.add_argument("--kv-mib", default="2048,256")
    parser.add_argument("--dtype", default="bfloat16", help="float32 where the processor has no bfloat16")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--long", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(options.model, Path(scratch))
        vocab = min(256, json.loads((folder / "config.json").read_text())["vocab_size"])
        mix = Mix(long=options.long, vocab=vocab, max_tokens=options.max_tokens)
        for kv_mib in map(int, options.kv_mib.split(",")):
            arguments = {
                "name": NAME,
                "path": str(folder),
                "dtype": options.dtype,
                "kv_cache_bytes": kv_mib << 20,
                "max_num_sequences": options.sequences,
            }
            with running_service() as service:
                results.append({"model": options.model, **asyncio.run(measure(service, arguments, mix, options))})
    print(json.dumps(results, indent=1))
    print("\n" + table(results))


if __name__ == "__main__":
    main()
