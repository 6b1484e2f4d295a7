"""An engine that measures cases for whoever writes to its standard input; `benchmarks/bench_engine.py` starts it.

Each line is JSON and so is each answer. The first says what to load. The code that is measured is that of the tree in
PYTHONPATH, so that processes of two trees can take turns.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_app.constraints.compilation import build_matcher, compile_source
from serve_app.constraints.vocabulary import Matcher
from serve_app.core.request import SamplingParams
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.memory import lay_in_huge_pages
from serve_app.engine.decoder.runner import Runner
from serve_app.engine.decoder.step import pack
from serve_app.engine.scheduler.planner import Pace
from serve_app.engine.scheduler.sequence import Batch, Sequence
from serve_app.replica.service import vocabulary_of
from tests.engine.harness import GREEDY, make_engine, request, sequences

NEW_TOKENS = 32
WARM_STEPS = 2
FILLED_AT_ONCE = 512
"""Tokens of prompts in a step that fills, at least."""
GRAMMAR = ("regex", r"( [a-z]+)+")
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "penalty_window": 64}
SAMPLING: dict[str, list[SamplingParams]] = {
    "greedy": [GREEDY],
    "plain": [SamplingParams(seed=1)],
    "nucleus": [SamplingParams(seed=1, temperature=0.9, top_p=0.9)],
    "truncated": [SamplingParams(seed=1, temperature=0.8, top_k=50, top_p=0.9)],
    "penalties": [SamplingParams(seed=1, **PENALTIES)],
    "mixed": [GREEDY, SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.9), SamplingParams(seed=3, **PENALTIES)],
}


class FillingRunner(Runner):
    """Writes random keys and values in the place of computing them, while `is_filling`: long contexts at once."""

    is_filling = False

    def forward(self, batch: Batch, token_ids: Tensor | None = None) -> Tensor:
        if not FillingRunner.is_filling:
            return super().forward(batch, token_ids)
        device = self._model.device
        step = pack(batch, self._storage).step(self._storage, device=device)
        tokens, dtype = len(step.token_ids), next(self._model.module.parameters()).dtype
        for number, layer in enumerate(self._model.shape.layers):
            key = torch.randn(tokens, layer.heads, layer.key_dim, dtype=dtype, device=device)
            value = torch.randn(tokens, layer.heads, layer.value_dim, dtype=dtype, device=device)
            self._storage.write(number, step.places, key, value)
        logits = torch.zeros(len(step.logit_rows), self._model.vocab_size, device=device)
        logits[:, 300] = 1.0
        return logits


class Unpaced(Pace):
    """Prompts take all of a step's budget: rows are there together, however many decode meanwhile."""

    def allowance(self, num_decoding: int, budget: int, *, behind: Items[int] = (), is_shared: bool = False) -> int:
        return budget


class Bench:
    """One engine, emptied after each case."""

    def __init__(self, settings: dict[str, Any], adapters: dict[str, str]) -> None:
        torch.set_num_threads(settings["threads"])
        folders = {version: Path(folder) for version, folder in adapters.items()}
        self._names = list(folders)
        self._engine = make_engine(EngineConfig(**settings), folders, eos_token_ids=frozenset(), runner=FillingRunner)
        self._engine._scheduler.pace = Unpaced(1.0)
        if self._engine.model.device.type == "cpu":
            lay_in_huge_pages()  # as a replica does beside its first requests
        self._draw = torch.Generator().manual_seed(0)
        self._master: Any = None
        self._num_asked = 0

    def measure(self, case: dict[str, Any], *, steps: int) -> dict[str, float]:
        """Median milliseconds of a step, or of all steps that prompts take: as the clock and as all CPUs have it."""
        self._make_resident(case)
        if case["kind"] == "decode":
            return self._decode(case, steps)
        return self._prefill(case)

    def close(self) -> None:
        """Give the model's memory back."""
        self._engine.close()
        del self._engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _decode(self, case: dict[str, Any], steps: int) -> dict[str, float]:
        length = steps + 8 + case["rows"] * case["context"] // FILLED_AT_ONCE  # the first go on while the last begin
        rows = [self._row(case, number, self._prompt(case["context"]), length) for number in range(case["rows"])]
        FillingRunner.is_filling = True
        for row in rows:
            self._engine.add([row])
        while any(row.num_computed <= case["context"] - 1 for row in rows):
            self._engine.step()
        FillingRunner.is_filling = False
        for _ in range(WARM_STEPS):
            self._engine.step()
        spent = [self._timed_step() for _ in range(steps)]
        assert not any(row.is_finished for row in rows), "a row ended before its steps were timed"
        self._empty()
        return {
            "wall_ms": statistics.median(wall for wall, _ in spent),
            "cpu_ms": statistics.median(cpu for _, cpu in spent),
        }

    def _prefill(self, case: dict[str, Any]) -> dict[str, float]:
        shared = self._prompt(case["context"]) if case["kind"] == "hit" else []
        if shared:
            FillingRunner.is_filling = True
            self._engine.add([self._row(case, 0, shared, 1)])
            self._drain()
            FillingRunner.is_filling = False
        length = NEW_TOKENS if shared else case["context"]
        for number in range(case["rows"]):
            self._engine.add([self._row(case, number, [*shared, *self._prompt(length)], 1)])
        wall, cpu = time.perf_counter(), time.process_time()
        self._drain()
        return {"wall_ms": (time.perf_counter() - wall) * 1e3, "cpu_ms": (time.process_time() - cpu) * 1e3}

    def _timed_step(self) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        self._engine.step()
        return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3

    def _make_resident(self, case: dict[str, Any]) -> None:
        """One token of each adapter that is to be there, so that none is read while steps are timed."""
        count = max(case["adapters"], case["resident"])
        FillingRunner.is_filling = True
        for number in range(count):
            self._engine.add([self._row(case | {"adapters": count}, number, self._prompt(4), 1)])
        self._drain()
        FillingRunner.is_filling = False

    def _row(self, case: dict[str, Any], number: int, prompt: list[int], max_tokens: int) -> Sequence:
        self._num_asked += 1
        mix = SAMPLING[case["sampling"]]
        adapter = self._names[number % case["adapters"]] if case["adapters"] else None
        sampling = mix[number % len(mix)]
        asked = request(f"r{self._num_asked}", max_tokens=max_tokens, adapter=adapter, sampling=sampling)
        (row,) = sequences(self._engine, asked, prompt)
        if case["is_constrained"]:
            row.matcher = self._matcher()
        return row

    def _matcher(self) -> Matcher:
        vocabulary = vocabulary_of(self._engine.tokenizer, self._engine.model.eos_token_ids)  # type: ignore[attr-defined]
        if self._master is None:
            tokenizer = vocabulary.tokenizer()
            self._master = build_matcher(compile_source(*GRAMMAR, tokenizer).text, tokenizer)  # type: ignore[arg-type]
        return Matcher(self._master.deep_copy(), num_words=vocabulary.num_words)

    def _prompt(self, length: int) -> list[int]:
        drawn: list[int] = torch.randint(10, 256, (length,), generator=self._draw).tolist()
        return drawn

    def _drain(self) -> None:
        while self._engine.has_work:
            self._engine.step()

    def _empty(self) -> None:
        self._engine.abort(frozenset(f"r{number}" for number in range(self._num_asked + 1)))
        self._drain()


def machine(threads: int, dtype: str) -> dict[str, float]:
    """Bytes per second that are read from memory, and operations per second of a product of matrices; the best seen."""
    torch.set_num_threads(threads)
    much = torch.ones(1 << 27)
    left, right = torch.ones(512, 896, dtype=getattr(torch, dtype)), torch.ones(896, 4864, dtype=getattr(torch, dtype))
    reads = [_seconds(much.sum) for _ in range(5)]
    products = [_seconds(lambda: left @ right) for _ in range(9)]
    return {"bytes_per_s": much.nbytes / min(reads), "flop_per_s": 2 * 512 * 896 * 4864 / min(products)}


def resident_mb() -> float:
    """Of this process, as the kernel counts it; 0 where there is no /proc."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6 if status.exists() else 0.0


def _seconds(work: Any) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    told = json.loads(sys.stdin.readline())
    with torch.inference_mode():
        begun, held = time.process_time(), resident_mb()
        bench = Bench(told["settings"], told["adapters"])
        loading = {"cpu_s": time.process_time() - begun, "memory_mb": resident_mb() - held}
        print(json.dumps(loading), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            if "machine" in asked:
                answer = machine(told["settings"]["threads"], asked["machine"])
            else:
                answer = bench.measure(asked["case"], steps=asked["steps"])
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
