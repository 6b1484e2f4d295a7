"""Our own kernels for what adapters change give what torch gives, a row the same in any company, and touch no other."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from serve_app.engine.lora.modules import Parts
from serve_app.engine.lora.plan import Mix
from serve_app.engine.lora.pool import AdapterBank
from serve_app.kernels.cpu.compiling import Kernel
from serve_app.kernels.cpu.low_rank import LowRankKernels, low_rank_kernels
from serve_app.kernels.forms import AdaptedLinear, Adding, PlainKernels
from serve_app.kernels.interface import adapter_kernels
from serve_app.kernels.openmp import libgomp
from tests.engine.adapter_files import load_adapter, save_adapter

pytestmark = pytest.mark.skipif(libgomp() is None, reason="needs torch's libgomp")

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SIZES = (96, 224, 64)
"""Four vectors of outputs at once, and what is left of them one by one."""
NO_VECTORS = (96, 204, 64)
BASE: Mix = ()


def make_model(dtype: torch.dtype, sizes: Sequence[int] = SIZES) -> nn.Module:
    torch.manual_seed(5)
    first, second, third = sizes
    return nn.Sequential(nn.Linear(first, second), nn.Linear(second, third, bias=False)).to(dtype).requires_grad_(False)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return saved(tmp_path, SIZES)


def saved(folder: Path, sizes: Sequence[int]) -> dict[str, Path]:
    model = make_model(torch.float32, sizes)
    return {
        "r4": save_adapter(folder / "r4", model, rank=4, seed=1),
        "r8": save_adapter(folder / "r8", model, rank=8, seed=2, alpha=20),
        "r20": save_adapter(folder / "r20", model, rank=20, seed=3),
        "second": save_adapter(folder / "second", model, rank=7, seed=4, targets=("1",)),
        "last": save_adapter(folder / "last", model, rank=3, seed=5),
        "dora": save_adapter(folder / "dora", model, rank=5, seed=6, use_dora=True),
    }


def make_bank(model: nn.Module, folders: Mapping[str, Path]) -> AdapterBank:
    adapters = [load_adapter(folder, version=version, model=model) for version, folder in folders.items()]
    bank = AdapterBank(model, adapters, max_slots=8)
    for slot, version in enumerate(folders):
        bank.load(slot, version)
    return bank


def computed(bank: AdapterBank, model: nn.Module, x: Tensor, mixes: Sequence[Mix], *, by_kernels: bool) -> Tensor:
    kernels = bank._step.kernels
    assert not isinstance(kernels, PlainKernels)
    bank._step.kernels = kernels if by_kernels else PlainKernels()
    bank._last_mixes = None
    with torch.inference_mode():
        bank.begin_step(mixes)
        try:
            return model(x)
        finally:
            bank.end_step()
            bank._step.kernels, bank._last_mixes = kernels, None


def drawn_mixes(seed: int) -> list[Mix]:
    """Rows of the base, of one adapter and of several, many of one among them."""
    draw = random.Random(seed)
    mixes: list[Mix] = [BASE, BASE, ((4, 1.0),), *[((0, 1.0),)] * draw.choice([1, 2, 7, 45])]
    for count in (1, 1, 1, 2, 2, 3):
        mixes.append(tuple((slot, draw.choice([1.0, -0.3, 0.7])) for slot in draw.sample(range(6), count)))
    draw.shuffle(mixes)
    return mixes


def rows(count: int, dtype: torch.dtype, size: int = SIZES[0]) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("seed", range(5))
def test_any_mix_of_rows_is_changed_as_by_torch(seed: int, dtype: torch.dtype, folders: dict[str, Path]) -> None:
    model = make_model(dtype)
    bank, mixes = make_bank(model, folders), drawn_mixes(seed)
    x, limit = rows(len(mixes), dtype), TOLERANCES[dtype]
    expected = computed(bank, model, x, mixes, by_kernels=False)
    found = computed(bank, model, x, mixes, by_kernels=True)
    torch.testing.assert_close(found.float(), expected.float(), rtol=limit, atol=30 * limit)
    plain = computed(bank, model, x, [((4, 1.0),), *[BASE] * (len(mixes) - 1)], by_kernels=True)
    others = [row for row, mix in enumerate(mixes) if not mix and row]
    assert torch.equal(found[others], plain[others]), "rows of the base keep every bit"
    changed = [row for row, mix in enumerate(mixes) if mix and row]
    assert not torch.isclose(found[changed].float(), plain[changed].float(), rtol=0.1, atol=0.1).all(1).any()


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_row_gets_the_same_bits_in_any_company(dtype: torch.dtype, folders: dict[str, Path]) -> None:
    model = make_model(dtype)
    bank = make_bank(model, folders)
    module, mix = bank.wrapped["0"], ((2, 0.7), (0, 1.0))
    x, y = rows(40, dtype), torch.zeros(40, SIZES[1], dtype=dtype)
    for place in (0, 2, 5, 6, 39):
        mixes: list[Mix] = [((2, 1.0),)] * 40
        mixes[place] = mix
        together, alone = y.clone(), y[:1].clone()
        for target, of, given in ((together, x, mixes), (alone, x[place : place + 1], [mix])):
            bank.begin_step(given)
            module.change(target, of)
            bank.end_step()
        assert torch.equal(together[place], alone[0])
        assert alone.any()


def test_what_is_no_number_stays_with_its_row(tmp_path: Path, folders: dict[str, Path]) -> None:
    model = make_model(torch.float32)
    huge = save_adapter(tmp_path / "huge", model, rank=4, down=1e38, up=1.0)
    bank = make_bank(model, {**folders, "huge": huge})
    x, mixes = rows(5, torch.float32), [BASE, ((0, 1.0),), ((1, 1.0),), ((0, 1.0),), BASE]
    before = computed(bank, model, x, mixes, by_kernels=True)
    mixes[2] = ((6, 1.0),)
    after = computed(bank, model, x, mixes, by_kernels=True)
    assert not after[2].isfinite().any()
    assert torch.equal(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_rows_of_any_stride_are_read_where_they_lie(folders: dict[str, Path]) -> None:
    bank = make_bank(make_model(torch.float32), folders)
    module, wide = bank.wrapped["0"], rows(6, torch.float32, 2 * SIZES[0])
    mixes: list[Mix] = [((row % 3, 1.0),) for row in range(6)]
    changed = []
    for x in (wide[:, : SIZES[0]].contiguous(), wide[:, : SIZES[0]], wide[:, : SIZES[0]].mT.contiguous().mT):
        joint = torch.zeros(6, SIZES[1] + 32)
        bank.begin_step(mixes)
        module.change(joint[:, 16:-16], x)
        bank.end_step()
        assert not joint[:, :16].any()
        assert not joint[:, -16:].any()
        changed.append(joint)
    assert torch.equal(changed[0], changed[1])
    assert torch.equal(changed[0], changed[2])


def test_adapters_that_come_and_go_are_computed_where_they_lie_now(folders: dict[str, Path]) -> None:
    model = make_model(torch.float32)
    adapters = [load_adapter(folder, version=version, model=model) for version, folder in folders.items()]
    bank, x = AdapterBank(model, adapters, max_slots=8), rows(3, torch.float32)
    module = bank.wrapped["0"]
    parts, before = Parts([(0, SIZES[1], module)]), [torch.zeros(3, SIZES[1])]
    for slots in ((0, 0, 0), (0, 1, 1), (0, 1, 2), (3, 1, 2), (4, 0, 3), (4, 4, 4)):
        for slot in set(range(5)) - set(slots):
            bank.vacate(slot)
        for slot in set(slots):
            if slot not in bank._residents:
                bank.load(slot, list(folders)[slot])
        mixes: list[Mix] = [((slot, 1.0),) for slot in slots]
        found, base = torch.zeros(3, SIZES[1]), module.base(x)
        bank.begin_step(mixes)
        parts.change(found, x)
        expected = module(x) - base
        bank.end_step()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert not any(torch.allclose(found, other) for other in before), "each step is another"
        before.append(found)


def test_sizes_of_no_whole_vectors_are_torchs(tmp_path: Path) -> None:
    bank = make_bank(make_model(torch.float32, NO_VECTORS), saved(tmp_path, NO_VECTORS))
    assert isinstance(bank._step.kernels, PlainKernels)
    assert bank.rows_of([((0, 1.0),)]) is None


def test_ranks_that_there_is_no_room_for_are_torchs() -> None:
    frame, kernels = torch.empty(32, 32), low_rank_kernels(torch.float32)
    assert kernels is not None
    found = functools.partial(adapter_kernels, [frame], device=frame.device, dtype=frame.dtype, uses_triton=False)
    assert found([8, kernels.most_rank]) is kernels
    assert found([8, 2 * kernels.most_rank]) is None


def test_kernels_that_compute_wrongly_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = LowRankKernels.adding

    def adding(self: LowRankKernels, parts: Sequence[AdaptedLinear]) -> Adding:
        def wrong(y: Tensor, *args: object) -> None:
            own(self, parts)(y, *args)  # type: ignore[arg-type]
            y[3] += 0.5

        return wrong

    monkeypatch.setattr(LowRankKernels, "adding", adding)
    assert low_rank_kernels.__wrapped__(torch.float32) is None
    assert "is wrong" in caplog.text


def test_where_none_can_be_made_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object, **__: object) -> object:
        raise RuntimeError("no LLVM")

    monkeypatch.setattr(Kernel, "__init__", missing)
    assert low_rank_kernels.__wrapped__(torch.float32) is None
    assert "no LLVM" in caplog.text
