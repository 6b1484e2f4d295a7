"""Sends the requests of a trace at their times, and writes the trace with what was measured.

    python -m benchmarks.replay trace.jsonl --url http://127.0.0.1:8000 --out recorded.jsonl

Equal pieces of prompts are equal tokens, so that prefixes are found as in the trace. With `--back-test`,
`serve_app whatif run recorded.jsonl` compares a simulation with it. With `--make N` it writes a trace of its own first:
documents that are asked again, and adapters, N requests with so many in a second (`--rate`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.load import ask
from serve_app.whatif.trace import Asked, read_trace

DOCUMENTS, DOCUMENT_BLOCKS, BLOCK_TOKENS = 12, (4, 8, 16), 64
MAX_ID = 255


def made(number: int, *, rate: float, model: str, adapters: int) -> list[dict[str, Any]]:
    """Return lines of a trace: half of the requests ask of documents, a fifth names an adapter."""
    random, at_s, lines, next_id = Random(0), 0.0, list[dict[str, Any]](), 1000
    sizes = [random.choice(DOCUMENT_BLOCKS) for _ in range(DOCUMENTS)]
    for _ in range(number):
        at_s += random.expovariate(rate)
        document = random.randrange(DOCUMENTS)
        names = [100 * document + block for block in range(sizes[document])] if random.random() < 0.5 else []
        own = random.choice((16, 32, 64, 256))
        next_id += 1
        adapter = f":lora-{random.randrange(adapters)}" if adapters and random.random() < 0.2 else ""
        lines.append({
            "timestamp": round(1000 * at_s), "input_length": BLOCK_TOKENS * len(names) + own,
            "output_length": random.choice((8, 16, 32, 64)), "hash_ids": names, "block_tokens": BLOCK_TOKENS,
            "model": f"{model}{adapter}",
        })  # fmt: skip
    return lines


def body_of(asked: Asked) -> dict[str, Any]:
    ids = [Random(name).choices(range(3, MAX_ID), k=size) for name, size in asked.pieces]
    return {
        "model": asked.model, "prompt": [*chain.from_iterable(ids)], "max_tokens": asked.output_tokens,
        "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


async def replayed(trace: list[Asked], url: str) -> list[tuple[float | None, float | None]]:
    """Return the seconds to the first token and to the end of each; None of those that failed."""
    limits = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        bodies = [body_of(each) for each in trace]
        begin = asyncio.get_running_loop().time()

        async def one(asked: Asked, body: dict[str, Any]) -> tuple[float | None, float | None]:
            await asyncio.sleep(max(0.0, begin + asked.at_s - asyncio.get_running_loop().time()))
            answer = await ask(session, url, body)
            if answer.error is not None or not answer.seen_at:
                return None, None
            return answer.seen_at[0] - answer.sent_at, answer.ended_at - answer.sent_at

        return await asyncio.gather(*(one(*each) for each in zip(trace, bodies, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--make", type=int)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--adapters", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.make:
        lines = made(arguments.make, rate=arguments.rate, model=arguments.model, adapters=arguments.adapters)
        arguments.trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if arguments.out is None:
        return
    lines = [json.loads(line) for line in arguments.trace.read_text(encoding="utf-8").splitlines()]
    measured = asyncio.run(replayed(read_trace(str(arguments.trace)), arguments.url))
    for line, (first_s, total_s) in zip(lines, measured, strict=True):
        if first_s is not None and total_s is not None:
            line |= {"first_s": round(first_s, 4), "total_s": round(total_s, 4)}
    arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
