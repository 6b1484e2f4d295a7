"""Law: a row is computed with its own adapter and nothing else, at the cost of the adapters that are present."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from serve_app.engine.lora.adapter import LowRank
from serve_app.engine.lora.matching import AdapterRefused
from serve_app.engine.lora.plan import Mix
from serve_app.engine.lora.pool import AdapterBank
from tests.engine.adapter_files import load_adapter, save_adapter, version_in

WIDTH, HIDDEN = 24, 40


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)).to(dtype).requires_grad_(False)


def make_bank(
    model: nn.Module, folders: Mapping[str, Path], *, max_slots: int = 32, max_bytes: int | None = None
) -> AdapterBank:
    adapters = [load_adapter(folder, version=version, model=model) for version, folder in folders.items()]
    return AdapterBank(model, adapters, max_slots=max_slots, max_bytes=max_bytes)


def alone(slot: int) -> Mix:
    """One adapter at its own strength; -1 is the base."""
    return () if slot < 0 else ((slot, 1.0),)


def run(model: nn.Module, bank: AdapterBank, x: Tensor, slots: Sequence[int | Mix]) -> Tensor:
    with torch.inference_mode():
        bank.begin_step([alone(slot) if isinstance(slot, int) else slot for slot in slots])
        try:
            return model(x)
        finally:
            bank.end_step()


def row_by_row(model: nn.Module, weights: list[dict[str, LowRank]], x: Tensor, slots: list[int]) -> Tensor:
    """The simple reference: each row by itself, each factor by itself, in float32."""
    rows = []
    for row, slot in zip(x.float(), slots, strict=True):
        for name, module in model.named_children():
            linear = getattr(module, "base", module)
            low_rank = weights[slot].get(name) if slot >= 0 else None
            y = linear.weight.float() @ row
            if low_rank is not None:
                y = y if low_rank.gain is None else y * low_rank.gain.float()
                y = y + low_rank.up.float() @ (low_rank.down.float() @ row)
            row = y if linear.bias is None else y + linear.bias.float()
        rows.append(row)
    return torch.stack(rows)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    model = make_model()
    return {
        "r4": save_adapter(tmp_path / "r4", model, rank=4, seed=1),
        "r8": save_adapter(tmp_path / "r8", model, rank=8, seed=2, alpha=20),
        "first": save_adapter(tmp_path / "first", model, rank=5, seed=3, targets=("0",)),
        "r20": save_adapter(tmp_path / "r20", model, rank=20, seed=4, dtype=torch.bfloat16),
        "second": save_adapter(tmp_path / "second", model, rank=9, seed=5, targets=("1",)),
        "dora": save_adapter(tmp_path / "dora", model, rank=3, seed=6, use_dora=True),
        "dora1": save_adapter(tmp_path / "dora1", model, rank=17, seed=7, use_dora=True, targets=("1",)),
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_rows_equals_each_row_by_itself(
    dtype: torch.dtype, tolerance: float, seed: int, folders: dict[str, Path]
) -> None:
    draw = random.Random(seed)
    model = make_model(dtype)
    bank = make_bank(model, folders)
    order = draw.sample(list(folders), len(folders))
    for slot, version in enumerate(order):
        bank.load(slot, version)
    weights = [bank.read(bank._adapters[version]) for version in order]
    slots = [draw.randrange(-1, len(order)) for _ in range(draw.choice([1, 5, 30]))]
    slots += [draw.randrange(-1, len(order))] * draw.choice([0, 40])
    draw.shuffle(slots) if seed % 2 else None
    x = torch.randn(len(slots), WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = row_by_row(model, weights, x, slots)
    torch.testing.assert_close(run(model, bank, x, slots).float(), expected, rtol=tolerance, atol=20 * tolerance)


def mixed_by_weights(model: nn.Module, weights: list[dict[str, LowRank]], x: Tensor, mixes: list[Mix]) -> Tensor:
    """The simple reference: each row with weights of its own, the base's and a share of what each adapter changes."""
    rows = []
    for row, mix in zip(x.double(), mixes, strict=True):
        for name, module in model.named_children():
            linear = getattr(module, "base", module)
            base = linear.weight.double()
            merged = base.clone()
            for slot, factor in mix:
                if name in weights[slot]:
                    low_rank = weights[slot][name]
                    changed = base if low_rank.gain is None else base * low_rank.gain.double()[:, None]
                    changed = changed + low_rank.up.double() @ low_rank.down.double()
                    merged += factor * (changed - base)
            row = merged @ row
            row = row if linear.bias is None else row + linear.bias.double()
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("seed", range(6))
def test_a_mix_is_the_sum_of_what_its_adapters_change_in_any_company(seed: int, folders: dict[str, Path]) -> None:
    draw = random.Random(seed)
    model = make_model()
    bank = make_bank(model, folders)
    order = draw.sample(list(folders), len(folders))
    for slot, version in enumerate(order):
        bank.load(slot, version)
    weights = [bank.read(bank._adapters[version]) for version in order]
    known: list[Mix] = [(), alone(0), alone(3)]
    known += [
        tuple((slot, draw.choice([-1.5, -0.25, 0.3, 0.7, 1.0, 2.0])) for slot in draw.sample(range(7), count))
        for count in (1, 1, 2, 2, 3, 4, 7)
    ]
    mixes = [draw.choice(known) for _ in range(draw.choice([3, 12, 60]))]
    x = torch.randn(len(mixes), WIDTH, generator=torch.Generator().manual_seed(seed))
    expected = mixed_by_weights(model, weights, x, mixes)
    torch.testing.assert_close(run(model, bank, x, mixes).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_mix_leaves_every_bit_of_the_rows_beside_it(tmp_path: Path, folders: dict[str, Path]) -> None:
    model = make_model()
    huge = save_adapter(tmp_path / "huge", model, rank=4, down=1e38, up=1.0)
    bank = make_bank(model, {**folders, "huge": huge})
    for slot, version in enumerate(["r4", "huge", "dora"]):
        bank.load(slot, version)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    company: list[Mix] = [(), alone(0), ((0, 0.5), (2, 0.5)), (), alone(2)]
    before = run(model, bank, x, company)
    company[2] = ((0, 0.5), (1, -0.5), (2, 0.5))
    beside_huge = run(model, bank, x, company)
    assert not beside_huge[2].isfinite().any(), "the mix should be harmful to its own row"
    assert torch.equal(bits(beside_huge[[0, 3]]), bits(before[[0, 3]]))
    torch.testing.assert_close(beside_huge[[1, 4]], before[[1, 4]])


def bits(y: Tensor) -> Tensor:
    return y.view(torch.int32)


@pytest.mark.law("Isolation")
def test_infinite_changes_of_one_row_leave_every_bit_of_the_others(tmp_path: Path, folders: dict[str, Path]) -> None:
    model = make_model()
    huge = save_adapter(tmp_path / "huge", model, rank=4, down=1e38, up=1.0)
    mild = save_adapter(tmp_path / "mild", model, rank=4, seed=9)
    bank = make_bank(model, {**folders, "huge": huge, "mild": mild})
    for slot, version in enumerate(["r4", "huge", "mild", "dora"]):
        bank.load(slot, version)
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))
    alone = run(model, bank, x, [-1] * 7)
    beside_mild = run(model, bank, x, [-1, 0, 2, -1, 0, 3, -1])
    beside_huge = run(model, bank, x, [-1, 0, 1, -1, 0, 3, -1])
    assert not beside_huge[2].isfinite().any(), "the adapter should be harmful to its own row"
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(bits(beside_huge[others]), bits(beside_mild[others]))
    assert torch.equal(bits(beside_huge[[0, 3, 6]]), bits(alone[[0, 3, 6]])), "the base's rows are those of no adapter"


def low_rank_flops(model: nn.Module, bank: AdapterBank, slots: list[int]) -> int:
    def flops(row_slots: list[int]) -> int:
        with FlopCounterMode(display=False) as counter:
            run(model, bank, torch.zeros(len(row_slots), WIDTH), row_slots)
        return counter.get_total_flops()

    return flops(slots) - flops([-1] * len(slots))


def test_a_step_computes_the_columns_of_the_adapters_present_and_no_others(tmp_path: Path) -> None:
    model = make_model()
    folders = {f"a{i}": save_adapter(tmp_path / f"a{i}", model, rank=16, seed=i) for i in range(6)}
    folders["wide"] = save_adapter(tmp_path / "wide", model, rank=256, seed=9)
    bank = make_bank(model, folders)
    for slot, version in enumerate(folders):
        bank.load(slot, version)
    per_rank = 2 * (WIDTH + HIDDEN) * 2  # multiply and add, down and up, both modules
    assert low_rank_flops(model, bank, [0, 1, 2, 3]) == 4 * 16 * per_rank
    assert low_rank_flops(model, bank, [0, -1, -1, 5]) == 2 * 16 * per_rank
    assert low_rank_flops(model, bank, [6, 0, 0, 0]) == (256 + 3 * 16) * per_rank


def test_uneven_rows_cost_less_than_twice_what_they_need(tmp_path: Path) -> None:
    model = make_model()
    folders = {f"a{i}": save_adapter(tmp_path / f"a{i}", model, rank=8, seed=i) for i in range(8)}
    bank = make_bank(model, folders)
    for slot, version in enumerate(folders):
        bank.load(slot, version)
    draw = random.Random(3)
    for _ in range(20):
        slots = [slot for slot in range(8) for _ in range(draw.choice([0, 1, 2, 3, 7, 16, 17, 90]))]
        assert low_rank_flops(model, bank, slots) < 2 * len(slots) * 8 * 2 * (WIDTH + HIDDEN) * 2 or not slots


def test_memory_follows_the_adapters_that_are_resident(tmp_path: Path) -> None:
    model = make_model()
    folders = {f"a{i}": save_adapter(tmp_path / f"a{i}", model, rank=16, seed=i) for i in range(8)}
    folders["wide"] = save_adapter(tmp_path / "wide", model, rank=256, seed=9)
    bank = make_bank(model, folders, max_slots=4)
    per_column = 2 * (WIDTH + HIDDEN) * 4
    assert bank.num_bytes == 0
    bank.load(0, "a0")
    assert bank.num_bytes == 16 * per_column
    for slot in (1, 2):
        bank.load(slot, f"a{slot}")
    assert bank.num_bytes <= 4 * 16 * per_column
    bank.load(3, "wide")
    assert bank.num_bytes <= (4 * 16 + 256) * per_column
    bank.load(3, "a3")
    assert bank.num_bytes == 4 * 16 * per_column, "the wide adapter's memory is given back"


def test_no_places_are_made_for_later_beyond_the_budget(tmp_path: Path) -> None:
    model = make_model()
    folders = {f"a{i}": save_adapter(tmp_path / f"a{i}", model, rank=16, seed=i) for i in range(8)}
    of_one = 16 * 2 * (WIDTH + HIDDEN) * 4
    for count in (3, 5, 7):
        bank = make_bank(model, folders, max_bytes=count * of_one)
        for slot in range(count):
            assert bank.fits([f"a{each}" for each in range(slot + 1)])
            bank.load(slot, f"a{slot}")
            assert bank.num_bytes <= count * of_one
        assert not bank.fits(folders)
        bank.unwrap()


def test_staging_changes_nothing_until_it_is_swapped_in(folders: dict[str, Path]) -> None:
    model = make_model()
    bank = make_bank(model, folders)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2))
    bank.load(0, "r4")
    before = run(model, bank, x, [0, -1])
    for slot, version in enumerate(["r8", "first", "dora"], start=1):  # same shelf: it grows while slot 0 is in use
        swap_in = bank.stage(slot, version)
        assert version_in(bank, slot) is None
        assert torch.equal(run(model, bank, x, [0, -1]), before)
        with pytest.raises(AssertionError, match=f"slot {slot}"):
            bank.begin_step([alone(0), alone(slot)])
        swap_in()
        assert version_in(bank, slot) == version
        assert not torch.equal(run(model, bank, x, [0, slot])[1], before[1])


@pytest.mark.law("Adapters")
def test_a_slot_that_changed_hands_is_never_computed_with_its_last_adapter(folders: dict[str, Path]) -> None:
    model = make_model()
    bank = make_bank(model, folders)
    bank.load(0, "r4")
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2))
    first = run(model, bank, x, [0])
    bank.vacate(0)
    assert version_in(bank, 0) is None
    with pytest.raises(AssertionError, match="slot 0"):
        bank.begin_step([alone(0)])
    bank.load(0, "r8")
    assert not torch.equal(run(model, bank, x, [0]), first)


def test_an_adapter_that_cannot_be_read_leaves_its_slot_empty(folders: dict[str, Path]) -> None:
    model = make_model()
    bank = make_bank(model, folders)
    bank.load(0, "r4")
    (folders["r8"] / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterRefused, match="cannot be read any more"):
        bank.load(0, "r8")
    assert version_in(bank, 0) is None
    bank.load(0, "r4")
    assert version_in(bank, 0) == "r4"


def test_a_module_that_sees_other_rows_than_the_batch_is_an_error(folders: dict[str, Path]) -> None:
    model = make_model()
    bank = make_bank(model, folders)
    bank.load(0, "r4")
    with pytest.raises(RuntimeError, match="2 rows in a step of 3"):
        run(model, bank, torch.zeros(2, WIDTH), [0, 0, -1])
