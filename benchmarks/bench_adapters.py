"""What published adapters cost: being published beside running streams, at a start, and with more of them than slots.

    python -m benchmarks.bench_adapters staging --folder /data/bench
    python -m benchmarks.bench_adapters traffic --count 1000 --sets 16,24,32,48,64 --plot adapters.svg
    python -m benchmarks.bench_adapters start --count 1000
    python -m benchmarks.bench_adapters replicas --replicas 2 --sets 32

Real engines and a router in one process, without Ray. `folder` keeps the model and the adapters, which have random
numbers, for the next run. Prints a JSON line for each case; seconds are in `_s`, megabytes are of 10^6 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.figures import quantile
from benchmarks.plots import curves
from benchmarks.random_models import SHAPES, model_folder
from serve_app.catalog.adapters import CONFIG, WEIGHTS, read_version
from serve_app.catalog.published import PublishedFiles
from serve_app.core.adapters import AdapterSet, PublishedAdapter
from serve_app.core.cards import Residency
from serve_app.replica.service import ModelService
from tests.engine.harness import core_of
from tests.flow.stack import HandDrivenClient, Stack, running_stack

RANK = 16
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT_TOKENS = 64


def adapter_folders(folder: Path, model: Path, count: int) -> list[Path]:
    """Make so many adapters of all linears of a model in bfloat16, unless they are there."""
    folders = [folder / f"a{number}" for number in range(count)]
    missing = [each for each in folders if not (each / CONFIG).exists()]
    if not missing:
        return folders
    first = folder / "a0"
    first.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(SHAPES[model.name]())
    tensors = {}
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear) and name.endswith(LINEARS):
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, linear.in_features, dtype=torch.bfloat16) * 0.02
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(linear.out_features, RANK, dtype=torch.bfloat16) * 0.02
    save_file(tensors, first / WEIGHTS)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(LINEARS)}
    (first / CONFIG).write_text(json.dumps(config))
    numbers = np.fromfile(first / WEIGHTS, dtype=np.uint8)
    for each in missing:
        if each != first:
            each.mkdir(exist_ok=True)
            numbers[-4096::2] = np.random.default_rng(int(each.name[1:])).integers(0, 256, 2048)  # low bytes: finite
            numbers.tofile(each / WEIGHTS)
            shutil.copy(first / CONFIG, each / CONFIG)
    return folders


class Bench:
    """One model behind a router, and the adapters that may be published.

    services: its replicas
    """

    def __init__(self, stack: Stack, folders: list[Path]) -> None:
        self.services: list[ModelService] = stack.services
        self._stack = stack
        self.folders = folders
        self._random = Random(0)

    async def publish_all(self) -> float:
        """Have all replicas apply a set of all adapters; return the seconds of that."""
        files = PublishedFiles()
        adapters = tuple(
            PublishedAdapter(base="bench", name=each.name, version=version, path=str(each))
            for each in self.folders
            for version in [files.read(str(each), each.name, "").version]
        )
        begun = time.perf_counter()
        published = AdapterSet(revision=1, adapters=adapters)
        await asyncio.gather(*(service.apply_adapters(published) for service in self.services))
        took = time.perf_counter() - begun
        await self._stack.greet()
        return took

    async def ask(self, adapter: str | None, tokens: int) -> list[float]:
        """Stream a completion; return the seconds until each piece of the body came."""
        model = "bench" if adapter is None else f"bench:{adapter}"
        prompt = self._random.choices(range(3, 250), k=PROMPT_TOKENS)
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        body["ignore_eos"] = True
        client, begun = HandDrivenClient(self._stack.app, body), time.perf_counter()
        running, times = asyncio.create_task(client.run()), []
        while True:
            message = await client.messages.get()
            assert message.get("status", 200) == 200, message
            if message["type"] == "http.response.body":
                if message.get("body"):
                    times.append(time.perf_counter() - begun)
                if not message.get("more_body"):
                    break
        client.leaves.set()
        await running
        return times

    @property
    def residency(self) -> list[Residency]:
        return [core_of(service).residency for service in self.services]


def version_of(folder: Path) -> str:
    return read_version(folder, root=folder.parent)


@asynccontextmanager
async def bench(options: argparse.Namespace, count: int, *, num_replicas: int = 1) -> AsyncIterator[Bench]:
    model = options.folder / options.model
    if not model.exists():
        model_folder(options.model, options.folder)
    folders = adapter_folders(options.folder / f"adapters-{options.model}", model, count)
    changes = {"name": "bench", "path": str(model), "adapters": None, "dtype": "bfloat16", "max_adapters": 16}
    logging.disable()  # of a line for each request
    async with running_stack(num_replicas=num_replicas, **changes, kv_cache_bytes=1 << 28) as stack:
        yield Bench(stack, folders)


async def staging(options: argparse.Namespace) -> None:
    """Publish adapters one after the other beside eight streams."""
    async with bench(options, options.count) as made:
        [service] = made.services
        streams = [asyncio.create_task(made.ask(None, options.tokens)) for _ in range(8)]
        await asyncio.sleep(5)
        seconds, begun_at = [], time.perf_counter()
        for folder in made.folders:
            begun = time.perf_counter()
            version = await asyncio.to_thread(version_of, folder)
            await service.stage_adapter(folder.name, str(folder), version)
            seconds.append(time.perf_counter() - begun)
            await asyncio.sleep(1)
        took = time.perf_counter() - begun_at
        assert not any(stream.done() for stream in streams), "more --tokens"
        gaps = []
        for stream in streams:
            times = await stream
            gaps += [after - before for before, after in pairwise(times)]
        tell(
            first_s=seconds[0], median_s=median(seconds[1:]), worst_s=max(seconds[1:]), took_s=took,
            gap_p50_s=quantile(gaps, 50), gap_p99_s=quantile(gaps, 99), worst_gap_s=max(gaps),
        )  # fmt: skip


async def start(options: argparse.Namespace) -> None:
    """Have a replica apply a set of all adapters, as one that starts does."""
    async with bench(options, options.count) as made:
        before = megabytes()
        applied_s = await made.publish_all()
        tell(published=options.count, applied_s=applied_s, rss_mb=megabytes(), rss_more_mb=megabytes() - before)


async def traffic(options: argparse.Namespace) -> None:
    """Ask for adapters by Zipf's law, of more and more of them."""
    points = []
    async with bench(options, options.count, num_replicas=options.replicas) as made:
        before = megabytes()
        await made.publish_all()
        await asyncio.gather(*(made.ask(f"a{number}", 1) for number in range(8)))
        resident = None
        for size in (8, *options.sets):
            random, was = Random(size), made.residency
            names = [f"a{number}" for number in range(size)]
            drawn = random.choices(names, [1 / (rank + 1) for rank in range(size)], k=options.requests)
            waiting, firsts = iter(drawn), []

            async def work(waiting: Any = waiting, firsts: list[float] = firsts) -> None:
                for name in waiting:
                    firsts.append((await made.ask(name, options.tokens))[0])

            begun = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(options.at_once)))
            now = made.residency
            loads = sum(a.num_loads - b.num_loads for a, b in zip(now, was, strict=True))
            p50 = median(firsts)
            resident = resident or p50
            points.append((float(size), p50))
            tell(
                working_set=size, first_p50_s=p50, of_resident=p50 / resident, first_p99_s=quantile(firsts, 99),
                hit_rate=1 - loads / options.requests, loads=loads, load_s=max(each.load_s for each in now),
                took_s=time.perf_counter() - begun, rss_mb=megabytes(), rss_more_mb=megabytes() - before,
                adapters_mb=sum(each.num_bytes for each in now) / 1e6,
                most_mb=sum(each.max_bytes for each in now) / 1e6,
            )  # fmt: skip
    if options.plot is not None:
        title = f"{options.count} adapters of rank {RANK}, {16 * options.replicas} slots"
        options.plot.write_text(curves(title, "adapters that are asked for", "first token, p50, s", {"": points}))


def megabytes() -> float:
    return psutil.Process().memory_info().rss / 1e6


def tell(**figures: float | None) -> None:
    told = {name: round(each, 3) if isinstance(each, float) else each for name, each in figures.items()}
    print(json.dumps(told), flush=True)


CASES = {"staging": staging, "start": start, "traffic": traffic, "replicas": traffic}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--model", default="random-0.5b", choices=SHAPES)
    parser.add_argument("--folder", type=Path, default=Path("build/bench"))
    parser.add_argument("--count", type=int, default=8, help="of published adapters")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--sets", type=lambda text: [int(each) for each in text.split(",")], default=[16, 24, 32])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    asyncio.run(CASES[options.case](options))


if __name__ == "__main__":
    main()
