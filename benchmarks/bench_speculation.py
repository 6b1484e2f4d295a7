"""Measures what guesses give and take: texts that come as they were predicted, most of them, or not at all.

Usage: python -m benchmarks.bench_speculation MODEL_FOLDER [B …]

Each text is first drawn without guesses; then the same is decoded again without, with prompt lookup, with a wrong
prediction, with one of which a fifth is wrong, and with a right one, one after the other and anew in each round. Times
are of decoding alone. As texts are the same, the ratio of times is that of tokens per second.
"""

from __future__ import annotations

import fcntl
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median

import torch

from serve_app.core.request import SamplingParams
from serve_app.engine.engine import Engine
from tests.engine.harness import config, make_engine, request, sequences

ROUNDS = 3
PROMPT_TOKENS = 64
LOCK = os.environ.get("QUIET_LOCK")
Texts = list[list[int]]


def decode(
    engine: Engine, prompts: Texts, expected: Sequence[tuple[int, ...]], num_tokens: int, temperature: float
) -> tuple[Texts, float]:
    """The texts, and the seconds that they took from the first token of all on."""
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=temperature, seed=number)
        asked = request(f"r{number}", max_tokens=num_tokens, sampling=sampling, prediction=expected[number])
        engine.add(sequences(engine, asked, prompt))
    texts: Texts = [[] for _ in prompts]
    started = None
    while engine.has_work:
        for delta in engine.step():
            texts[int(delta.request_id[1:])] += delta.token_ids
        if started is None and all(texts):
            started = time.perf_counter()
    assert started is not None
    return texts, time.perf_counter() - started


def spoiled(text: list[int], is_wrong: Callable[[int], bool]) -> tuple[int, ...]:
    return tuple(token_id + 1 if is_wrong(place) else token_id for place, token_id in enumerate(text))


def measure(engine: Engine, prompts: Texts, num_tokens: int, temperature: float) -> None:
    nothing = [()] * len(prompts)
    engine.speculator.max_draft = 0
    texts, _ = decode(engine, prompts, nothing, num_tokens, temperature)
    modes = {
        "without": (0, nothing),
        "prompt lookup": (8, nothing),
        "all wrong": (8, [spoiled(text, lambda _: True) for text in texts]),
        "a fifth wrong": (8, [spoiled(text, lambda place: place % 5 == 4) for text in texts]),
        "right": (8, [tuple(text) for text in texts]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    counts: dict[str, tuple[int, int]] = {}
    same = dict.fromkeys(modes, True)
    for _ in range(ROUNDS):
        with alone():
            for name, (max_draft, expected) in modes.items():
                engine.speculator.max_draft, before = max_draft, engine.load
                found, taken_s = decode(engine, prompts, expected, num_tokens, temperature)
                seconds[name].append(taken_s)
                drafted = engine.load.num_drafted_tokens - before.num_drafted_tokens
                counts[name] = drafted, engine.load.num_accepted_tokens - before.num_accepted_tokens
                same[name] &= found == texts
    for name in modes:
        ratios = [plain / own for plain, own in zip(seconds["without"], seconds[name], strict=True)]
        rate = len(prompts) * (num_tokens - 1) / median(seconds[name])
        drafted, accepted = counts[name]
        print(
            f"B={len(prompts):2} T={temperature} {name:14} {rate:7.1f} tokens/s  × {median(ratios):.2f} "
            f"(best {max(ratios):.2f}, worst {min(ratios):.2f})  drafted {drafted:4} accepted {accepted:4}"
            f"  same {same[name]}",
            flush=True,
        )


class alone:
    """Where `QUIET_LOCK` names a file: nobody else measures meanwhile, and ours goes first."""

    def __enter__(self) -> None:
        if LOCK:
            self._file = open(LOCK, "w")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            with suppress(PermissionError):
                set_policy(os.SCHED_RR, 20)

    def __exit__(self, *_: object) -> None:
        if LOCK:
            set_policy(os.SCHED_OTHER, 0)
            self._file.close()


def set_policy(policy: int, priority: int) -> None:
    """Of every thread of the process."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


def main(folder: str, sizes: list[int]) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    engine = make_engine(
        config(folder, speculation="prompt_lookup", max_num_sequences=32, max_batch_tokens=256, kv_cache_bytes=1 << 30),
        eos_token_ids=frozenset(),
    )
    generator = random.Random(1)
    vocab = min(engine.model.vocab_size, 8000)
    for size in sizes:
        prompts = [[generator.randrange(10, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(size)]
        for temperature in (1.0, 0.0) if size == 1 else (1.0,):
            measure(engine, prompts, 48 if size == 1 else 20, temperature)


if __name__ == "__main__":
    main(sys.argv[1], [int(size) for size in sys.argv[2:]] or [1, 8, 32])
