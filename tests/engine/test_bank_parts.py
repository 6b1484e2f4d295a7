"""Several linears of one input: changed side by side, their rows picked once, small ones without waking a thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from serve_app.engine.lora.modules import MOST_ROWS_ALONE, BankedLinear, Parts
from serve_app.engine.lora.plan import Plan
from serve_app.engine.lora.pool import AdapterBank
from tests.engine.adapter_files import load_adapter, save_adapter

WIDTH, OUTPUTS = 24, (16, 8, 40)


class Calls(TorchDispatchMode):
    """Writes down the names of the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Watched(BankedLinear):
    """Writes down how many threads it may use."""

    def add_products(self, y: Tensor, picked: Sequence[Tensor], plan: Plan) -> None:
        self.num_threads = torch.get_num_threads()
        super().add_products(y, picked, plan)


@pytest.fixture
def bank(tmp_path: Path) -> AdapterBank:
    torch.manual_seed(5)
    model = nn.ModuleList(nn.Linear(WIDTH, outputs) for outputs in OUTPUTS).requires_grad_(False)
    folders = {
        "r4": save_adapter(tmp_path / "r4", model, rank=4, seed=1),
        "r8": save_adapter(tmp_path / "r8", model, rank=8, seed=2, targets=("0", "2")),
        "r20": save_adapter(tmp_path / "r20", model, rank=20, seed=3),
        "dora": save_adapter(tmp_path / "dora", model, rank=3, seed=4, use_dora=True),
    }
    adapters = [load_adapter(folder, version=version, model=model) for version, folder in folders.items()]
    bank = AdapterBank(model, adapters, max_slots=4)
    for slot, version in enumerate(folders):
        bank.load(slot, version)
    return bank


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def parts_of(bank: AdapterBank) -> list[tuple[int, int, BankedLinear]]:
    ends = [sum(OUTPUTS[: number + 1]) for number in range(len(OUTPUTS))]
    return [(end - size, end, bank.wrapped[str(i)]) for i, (end, size) in enumerate(zip(ends, OUTPUTS, strict=True))]


MIXES = [((0, 1.0),), (), ((3, 1.0),), ((1, 0.5), (2, -1.0)), ((2, 1.0),), ((0, 1.0),), ((3, 0.3), (0, 1.0))]


@torch.inference_mode()
def test_parts_of_a_joint_output_are_changed_as_each_by_itself(bank: AdapterBank) -> None:
    x = torch.randn(len(MIXES), WIDTH, generator=torch.Generator().manual_seed(7))
    parts = parts_of(bank)
    joint = torch.cat([linear.base(x) for _, _, linear in parts], dim=1)
    bank.begin_step(MIXES)
    expected = torch.cat([linear(x) for _, _, linear in parts], dim=1)
    Parts(parts).change(joint, x)
    bank.end_step()
    assert torch.equal(joint, expected)
    assert not torch.equal(joint, torch.cat([linear.base(x) for _, _, linear in parts], dim=1))


@torch.inference_mode()
def test_rows_are_picked_once_for_all_parts(bank: AdapterBank) -> None:
    mixes = [((number % 2, 1.0),) for number in range(6)]  # one pass, its rows in another order than they come
    x, y = torch.randn(6, WIDTH), torch.zeros(6, sum(OUTPUTS))
    bank.begin_step(mixes)
    with Calls() as joint:
        Parts(parts_of(bank)).change(y, x)
    with Calls() as apart:
        for begin, end, linear in parts_of(bank):
            linear.change(y[:, begin:end], x)
    bank.end_step()
    assert apart.names.count("index_select") - joint.names.count("index_select") == len(OUTPUTS) - 1


@torch.inference_mode()
@pytest.mark.parametrize(("num_rows", "expected"), [(MOST_ROWS_ALONE, 1), (MOST_ROWS_ALONE + 1, 2)])
def test_few_rows_wake_no_thread(bank: AdapterBank, two_threads: None, num_rows: int, expected: int) -> None:
    base = bank.wrapped["0"]
    linear = Watched(base.base, "0", shelves=base._shelves, step=base._step)
    bank.begin_step([((0, 1.0),)] * num_rows)
    linear.change(torch.zeros(num_rows, OUTPUTS[0]), torch.randn(num_rows, WIDTH))
    assert linear.num_threads == expected
    with pytest.raises(RuntimeError):
        linear.change(torch.zeros(2, OUTPUTS[0]), torch.randn(3, WIDTH))
    bank.end_step()
    assert torch.get_num_threads() == 2
