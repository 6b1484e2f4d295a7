"""Several linears of one input are changed side by side as each by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from serve_app.engine.lora.modules import BankedLinear, Parts
from serve_app.engine.lora.pool import AdapterBank
from tests.engine.adapter_files import load_adapter, save_adapter

WIDTH, OUTPUTS = 24, (16, 8, 40)


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
def test_rows_of_another_step_are_refused(bank: AdapterBank) -> None:
    bank.begin_step([((0, 1.0),)] * 2)
    with pytest.raises(RuntimeError, match="was given 3 rows in a step of 2"):
        bank.wrapped["0"].change(torch.zeros(3, OUTPUTS[0]), torch.randn(3, WIDTH))
    bank.end_step()
