"""What adapters add to a decode step, for some companies of rows, in the shapes of a model of half a billion weights.

    python benchmarks/bench_adapter_steps.py --layers 24 --rounds 7

Interleaves each case with the same rows on the base. Prints one JSON line per mix: CPU milliseconds per step (all
threads together) of the linear layers alone and with adapters, and the columns of low rank that were computed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

from serve_app.engine.lora.plan import Mix
from serve_app.engine.lora.pool import AdapterBank
from tests.engine.adapter_files import load_adapter, save_adapter

WIDTH, KEYS, HIDDEN = 896, 128, 4864
SHAPES = {
    "q": (WIDTH, WIDTH), "k": (WIDTH, KEYS), "v": (WIDTH, KEYS), "o": (WIDTH, WIDTH),
    "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
}  # fmt: skip
ROWS = 16


def each(*slots: int) -> list[Mix]:
    """One adapter for each row, at its own strength; -1 is the base."""
    return [() if slot < 0 else ((slot, 1.0),) for slot in slots]


CASES: dict[str, tuple[list[int], list[Mix]]] = {
    "1 of 16 resident, every row": ([16] * 16, each(*[0] * ROWS)),
    "1 of 16 resident, every other row": ([16] * 16, each(*[0, -1] * (ROWS // 2))),
    "8 of 8": ([16] * 8, each(*list(range(8)) * 2)),
    "16 of 16": ([16] * 16, each(*range(16))),
    "8 of 8 beside a resident one of rank 256": ([16] * 8 + [256], each(*list(range(8)) * 2)),
    "7 of 7 and one of rank 256": ([16] * 7 + [256], each(*list(range(8)) * 2)),
    "a mix of 2 of 8, every row": ([16] * 8, [((0, 0.7), (1, 0.3))] * ROWS),
    "8 mixes of 2 of 8": ([16] * 8, [((slot, 0.7), ((slot + 1) % 8, 0.3)) for slot in range(8)] * 2),
}


def make_layers(num_layers: int) -> nn.Module:
    layers = [
        nn.ModuleDict({name: nn.Linear(i, o, bias=False, dtype=torch.bfloat16) for name, (i, o) in SHAPES.items()})
        for _ in range(num_layers)
    ]
    return nn.ModuleList(layers).requires_grad_(False)


@torch.inference_mode()
def step_ms(layers: nn.Module, bank: AdapterBank, mixes: list[Mix]) -> float:
    inputs = {size: torch.ones(1, len(mixes), size, dtype=torch.bfloat16) for size in (WIDTH, HIDDEN)}
    started = time.process_time()
    bank.begin_step(mixes)
    for layer in layers:  # type: ignore[attr-defined]
        for name, (in_features, _) in SHAPES.items():
            layer[name](inputs[in_features])
    bank.end_step()
    return (time.process_time() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for case, (ranks, mixes) in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            layers = make_layers(args.layers)
            folders = [
                save_adapter(Path(scratch) / str(i), layers, rank=rank, seed=i, dtype=torch.bfloat16)
                for i, rank in enumerate(ranks)
            ]
            adapters = [load_adapter(folder, version=folder.name, model=layers) for folder in folders]
            bank = AdapterBank(layers, adapters, max_slots=16)
            for slot, adapter in enumerate(adapters):
                bank.load(slot, adapter.version)
        base = each(*[-1] * ROWS)
        times = [(step_ms(layers, bank, base), step_ms(layers, bank, mixes)) for _ in range(args.rounds + 1)][1:]
        report = {
            "case": case,
            "base_ms": round(statistics.median(plain for plain, _ in times), 1),
            "adapted_ms": round(statistics.median(adapted for _, adapted in times), 1),
            "bank_mb": round(bank.num_bytes / 1e6, 1),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
