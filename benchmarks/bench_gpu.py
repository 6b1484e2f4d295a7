"""The engine on a GPU: steps that decode and prompts, beside the roofline and transformers' `generate`.

    python -m benchmarks.bench_gpu --shapes random-0.5b,random-1.5b,random-8b

Models of random weights in bfloat16 are made in a temporary folder, or in `--folder`, where they stay: that of 8
billion takes 16 GB, its 64 adapters another 5. Prints JSON: for each shape the cases with milliseconds, floor, tokens
per second and ratios, what the GPU was seen to read and to compute per second, and what misses the aims. Ends at once,
and says so, where torch sees no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.checkpoints import save_random_adapter
from benchmarks.engine_cases import Case, Shape
from benchmarks.engine_worker import Bench
from benchmarks.gpu_cases import ADAPTERS, CONTEXT, RANK, ROWS, SHAPES, adapter_bytes, cases, floor_ms, misses, told
from benchmarks.random_models import model_folder

NO_GPU = "bench_gpu: torch sees no CUDA device here, and nothing else is measured"
GENERATED = 16
"""Tokens of `generate` beyond the first."""
LARGE = {"cuda": (1 << 28, 8192), "cpu": (1 << 20, 128)}
"""Numbers that are copied and the sides of matrices that are multiplied to see what a device can."""


class Timer:
    """Seconds of what a device is asked for, waited for at both ends."""

    def __init__(self, device: torch.device) -> None:
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def best(self, work: Callable[[], object], *, rounds: int = 5) -> float:
        return min(self.once(work) for _ in range(rounds + 1))

    def once(self, work: Callable[[], object]) -> float:
        self._wait()
        begun = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - begun


def rates(device: torch.device) -> dict[str, float]:
    """Bytes that are read or written per second, and operations in products of bfloat16; the best seen."""
    size, side = LARGE[device.type]
    timer, source = Timer(device), torch.ones(size, device=device)
    target, left = torch.empty_like(source), torch.ones(side, side, dtype=torch.bfloat16, device=device)
    copying, multiplying = timer.best(lambda: target.copy_(source)), timer.best(lambda: left @ left)
    return {"bytes_per_s": 2 * source.nbytes / copying, "flop_per_s": 2 * side**3 / multiplying}


def generate_ms(module: Any, case: Case, vocab: int, timer: Timer) -> float:
    """Of a step of `generate` over the case's rows and context, or of the prompt alone."""
    ids = torch.randint(10, vocab, (case.rows, case.context), device=module.device)

    def run(count: int) -> float:
        settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            return timer.best(
                lambda: module.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings), rounds=2
            )

    if case.kind == "prefill":
        return run(1) * 1e3
    return (run(1 + GENERATED) - run(1)) * 1e3 / GENERATED


def measure(name: str, folder: Path, asked: Items[Case], device: torch.device, *, steps: int) -> list[dict[str, Any]]:
    """All cases of one shape; first the engine's, then, when that is gone, those of `generate`."""
    model = model_folder(name, folder)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    count = max(max(case.adapters, case.resident) for case in asked)
    settings = {
        "name": "bench", "path": str(model), "dtype": "bfloat16", "device": device.type, "threads": 4,
        "max_num_sequences": max(case.rows for case in asked), "max_batch_tokens": 2048, "max_adapters": max(1, count),
        "prefix_cache": False, "max_model_len": 2 * max(case.context for case in asked),
    }  # fmt: skip
    adapters = make_adapters(model, count, folder / f"{name}-adapters")
    bench = Bench(settings, adapters)
    walls = {}
    for case in asked:
        walls[case.name] = bench.measure(case.told(), steps=steps)["wall_ms"]
        print(f"{name}, {case.name}: {walls[case.name]:.3g} ms", file=sys.stderr, flush=True)
    bench.close()
    theirs = _generate_all(model, [case for case in asked if not case.adapters], config["vocab_size"], device)
    return rows_of(asked, walls, theirs, config, rates(device))


def rows_of(
    asked: Items[Case],
    walls: dict[str, float],
    theirs: dict[str, float],
    config: dict[str, Any],
    seen: dict[str, float],
) -> list[dict[str, Any]]:
    shape, of_adapter = Shape.of(config, 2), adapter_bytes(config, rank=RANK, itemsize=2)
    rows = []
    for case in asked:
        alone = next((walls[one.name] for one in asked if is_same_without(one, case)), None) if case.adapters else None
        floor = floor_ms(case, shape, of_adapter=of_adapter, **seen)
        rows.append(told(case, walls[case.name], floor, alone_ms=alone, generate_ms=theirs.get(case.name)))
    return rows


def is_same_without(one: Case, case: Case) -> bool:
    return (one.kind, one.rows, one.context, one.adapters) == (case.kind, case.rows, case.context, 0)


def make_adapters(model: Path, count: int, folder: Path) -> dict[str, str]:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return {
        f"a{number}": str(save_random_adapter(folder / f"a{number}", module, rank=RANK, seed=number))
        for number in range(count)
    }


def _generate_all(model: Path, asked: Items[Case], vocab: int, device: torch.device) -> dict[str, float]:
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, local_files_only=True).to(device).eval()
    timer = Timer(device)
    return {case.name: generate_ms(module, case, vocab, timer) for case in asked}


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", type=numbers, default=list(ROWS))
    parser.add_argument("--adapters", type=numbers, default=list(ADAPTERS))
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--folder", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit(NO_GPU)
    device = torch.device("cuda")
    asked = cases(rows=args.rows, adapters=args.adapters, context=args.context)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **rates(device)}
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.shapes.split(","):
            rows = measure(name, args.folder or Path(scratch), asked, device, steps=args.steps)
            report[name] = {"cases": rows, "misses": misses(rows)}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
