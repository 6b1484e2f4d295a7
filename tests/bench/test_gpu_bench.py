"""What the bench for GPUs counts, by hand for a small shape; that it refuses where there is none; and that it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import bench_gpu
from benchmarks.engine_cases import Case, Shape, decode
from benchmarks.gpu_cases import adapter_bytes, cases, floor_ms, misses, told

CONFIG = {
    "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50,
}  # fmt: skip
SHAPE = Shape.of(CONFIG, 2)


def test_floors_are_what_has_to_be_read_or_computed() -> None:
    linear = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 20)
    of_adapter = 3 * 4 * 2 * ((8 + 8) * 2 + (8 + 4) * 2 + (8 + 20) * 3)
    assert adapter_bytes(CONFIG, rank=4, itemsize=2) == of_adapter
    case = decode(5, 100, adapters=2, resident=7)
    read = 2 * (linear + 8 * 50) + 5 * 100 * (2 * 3 * 2 * 2 * 2) + 2 * of_adapter
    slow = {"bytes_per_s": 1e3, "flop_per_s": 1e12}
    assert floor_ms(case, SHAPE, of_adapter=of_adapter, **slow) == pytest.approx(read)
    prompt = Case(kind="prefill", rows=2, context=10)
    computed = 2 * 20 * linear + 2 * 2 * 8 * 50 + 4 * 3 * 4 * 2 * 2 * 55
    fast = {"bytes_per_s": 1e15, "flop_per_s": 1e3}
    assert floor_ms(prompt, SHAPE, of_adapter=0, **fast) == pytest.approx(computed)


def test_every_number_of_rows_has_as_many_adapters_as_it_can() -> None:
    names = [case.name for case in cases(rows=(1, 8, 64), adapters=(0, 8, 64), context=16)]
    assert names[:6] == [
        "decode 1 x 16", "decode 8 x 16", "decode 8 x 16, 8 of 64 adapters", "decode 64 x 16",
        "decode 64 x 16, 8 of 64 adapters", "decode 64 x 16, 64 of 64 adapters",
    ]  # fmt: skip
    assert all(name.startswith("prefill") for name in names[6:])


def test_a_report_says_ratios_and_what_misses_the_aims() -> None:
    alone, adapted = decode(4, 16), decode(4, 16, adapters=2)
    rows = [
        told(alone, 2.0, 1.6, alone_ms=None, generate_ms=5.0),
        told(adapted, 3.0, 1.5, alone_ms=2.0, generate_ms=None),
    ]
    assert rows[0]["wall/floor"] == pytest.approx(1.25)
    assert rows[0]["generate/wall"] == 2.5
    assert rows[0]["tokens_per_s"] == 2000
    assert rows[1]["with/without adapters"] == 1.5
    assert [line.split(":")[0] for line in misses(rows)] == [adapted.name, adapted.name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_where_there_is_no_gpu_it_says_so_and_ends() -> None:
    tree = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.bench_gpu"]
    ended = subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert bench_gpu.NO_GPU in ended.stderr
    assert not ended.stdout


@pytest.fixture
def threads_stay() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("threads_stay")
def test_a_small_shape_is_measured_on_a_cpu_as_others_are_on_a_gpu(tmp_path: Path) -> None:
    asked = [decode(2, 12), decode(2, 12, adapters=2, resident=2), Case(kind="prefill", rows=1, context=20)]
    rows = bench_gpu.measure("random-small", tmp_path, asked, torch.device("cpu"), steps=2)
    assert [row["case"] for row in rows] == [case.name for case in asked]
    assert all(row["wall_ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert [set(row) - {"case", "wall_ms", "floor_ms", "wall/floor", "tokens_per_s"} for row in rows] == [
        {"generate_ms", "generate/wall"}, {"with/without adapters"}, {"generate_ms", "generate/wall"},
    ]  # fmt: skip
