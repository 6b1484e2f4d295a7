"""Our own products of few rows are right, give a row alone what in company, and know what they cannot read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serve_app.engine.cpu import compiling, products
from serve_app.engine.cpu.products import MAX_ROWS, FewRows
from serve_app.engine.decoder.linears import NUM_ROWS, OneDnnWeight

HAS_KERNEL = products._kernel() is not None
needs_kernel = pytest.mark.skipif(not HAS_KERNEL, reason="a CPU without AVX512-BF16, or with AMX")
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
SIZES = [(64, 64), (80, 128), (448, 896), (208, 576), (192, 4864)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def made(outputs: int, inputs: int, *, has_bias: bool = False) -> tuple[OneDnnWeight, Tensor, Tensor | None]:
    weight, bias = drawn(outputs, inputs, seed=1), drawn(outputs, seed=2) if has_bias else None
    return OneDnnWeight(weight, bias), weight, bias


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@needs_kernel
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 12, 13, 29, MAX_ROWS])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_are_right(outputs: int, inputs: int, num_rows: int, has_bias: bool) -> None:
    kept, weight, bias = made(outputs, inputs, has_bias=has_bias)
    assert kept._few_rows is not None
    x = drawn(num_rows, inputs, seed=3)
    found, expected = kept._few_rows(x), exact(x, weight, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-3 * float(expected.abs().max()))
    assert torch.equal(kept(x), found), "it is this kernel that computes"


@needs_kernel
def test_a_row_gets_the_same_bits_in_any_company() -> None:
    kept, *_ = made(448, 896, has_bias=True)
    x = drawn(MAX_ROWS, 896)
    together = kept(x)
    for first, count in ((0, 1), (3, 4), (10, 7), (31, 33)):
        assert torch.equal(kept(x[first : first + count]), together[first : first + count])


@needs_kernel
def test_rows_may_lie_apart_from_each_other() -> None:
    kept, weight, _ = made(64, 64)
    wide = drawn(5, 200)
    x = wide[:, 40:104]
    torch.testing.assert_close(kept(x).double(), exact(x, weight, None), rtol=2**-7, atol=0.1)


@needs_kernel
def test_what_is_no_number_stays_in_its_row() -> None:
    kept, *_ = made(80, 128)
    x = drawn(9, 128)
    x[4, 70] = torch.nan
    assert kept(x).isnan().any(dim=1).tolist() == [row == 4 for row in range(9)]
    assert kept(x)[4].isnan().all()


@needs_onednn
def test_more_rows_and_other_shapes_are_left_to_onednn() -> None:
    kept, weight, _ = made(448, 896)
    for shape in ((MAX_ROWS + 1, 896), (2, 3, 896)):
        x = drawn(*shape)
        assert kept._few_rows is None or not kept._few_rows.takes(x)
        torch.testing.assert_close(kept(x).double(), exact(x, weight, None), rtol=2**-7, atol=0.5)


@needs_onednn
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 66), (72, 64), (64, 63), (1152, 1028)])
def test_sizes_that_it_does_not_divide_are_left_to_onednn(outputs: int, inputs: int) -> None:
    kept, weight, _ = made(outputs, inputs)
    assert kept._few_rows is None
    x = drawn(3, inputs)
    torch.testing.assert_close(kept(x).double(), exact(x, weight, None), rtol=2**-7, atol=0.5)


@needs_onednn
def test_wider_numbers_are_left_to_onednn() -> None:
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(64, 64), NUM_ROWS)
    assert FewRows.find(packed, None) is None


@needs_kernel
def test_a_weight_that_lies_otherwise_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = OneDnnWeight(drawn(128, 64), None).packed
    other = drawn(128, 64, seed=5)
    monkeypatch.setattr(torch.ops.mkldnn, "data_ptr", lambda _: other.data_ptr())
    assert FewRows.find(packed, None) is None


def test_where_no_kernel_can_be_made_onednn_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: object) -> object:
        raise RuntimeError("LLVM ended")

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(compiling, "compiled", refuse)
    assert products._kernel.__wrapped__() is None
    assert "LLVM ended" in caplog.text
