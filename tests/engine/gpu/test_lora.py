"""Changes of adapters by kernels are those of torch's operations, for any mix of rows, and touch no other row."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from serve_app.engine.lora.plan import Mix
from serve_app.engine.lora.pool import AdapterBank
from tests.engine.adapter_files import load_adapter, save_adapter

pytest.importorskip("triton", reason="its kernels can be neither compiled nor interpreted")

from serve_app.kernels.forms import PlainKernels
from serve_app.kernels.gpu.lora import SPLIT, agrees

pytestmark = pytest.mark.slow

WIDTH, HIDDEN = 24, SPLIT + 20
"""The sum over the wider inputs is cut."""


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(5)
    return (
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)).to(device).requires_grad_(False)
    )


def make_bank(model: nn.Module, folders: list[Path], *, uses_triton: bool) -> AdapterBank:
    adapters = [load_adapter(folder, version=folder.name, model=model) for folder in folders]
    bank = AdapterBank(model, adapters, max_slots=8, uses_triton=uses_triton)
    for slot, folder in enumerate(folders):
        bank.load(slot, folder.name)
    return bank


def save(folder: Path) -> list[Path]:
    model = make_model(torch.device("cpu"))
    return [
        save_adapter(folder / "r4", model, rank=4, seed=1),
        save_adapter(folder / "r8", model, rank=8, seed=2, alpha=20),
        save_adapter(folder / "r20", model, rank=20, seed=4),
        save_adapter(folder / "second", model, rank=9, seed=5, targets=("1",)),
        save_adapter(folder / "last", model, rank=3, seed=6, use_dora=True),
    ]


def compute(bank: AdapterBank, model: nn.Module, x: torch.Tensor, mixes: list[Mix]) -> torch.Tensor:
    with torch.inference_mode():
        bank.begin_step(mixes)
        try:
            return model(x)
        finally:
            bank.end_step()


def test_any_mix_of_rows_is_changed_as_by_torch(tmp_path: Path, device: torch.device) -> None:
    folders = save(tmp_path)
    models = [make_model(device) for _ in range(2)]
    banks = [make_bank(model, folders, uses_triton=used) for model, used in zip(models, (False, True), strict=True)]
    draw = random.Random(3)
    mixes: list[Mix] = [(), ((4, 1.0),), *[((0, 1.0),)] * 20]
    mixes += [tuple((slot, draw.choice([1.0, -0.3, 0.7])) for slot in draw.sample(range(5), 2)) for _ in range(8)]
    draw.shuffle(mixes)
    x = torch.randn(len(mixes), WIDTH, generator=torch.Generator().manual_seed(9)).to(device)
    assert [isinstance(bank._step.kernels, PlainKernels) for bank in banks] == [True, False]
    expected, found = (compute(bank, model, x, mixes) for bank, model in zip(banks, models, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    base = compute(banks[0], models[0], x, [()] * len(mixes))
    rows = [row for row, mix in enumerate(mixes) if not mix]
    assert torch.equal(found[rows], base[rows])


def test_where_kernels_do_not_run_torch_computes_the_changes(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    assert agrees(torch.float32, device)
    with caplog.at_level(logging.WARNING):
        assert not agrees(torch.float32, torch.device("meta"))  # whose tensors have no numbers
    assert "changes of adapters are torch's" in caplog.text
