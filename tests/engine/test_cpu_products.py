"""Our own products are right, give a row alone what in company, and know what they cannot read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.engine.decoder.linears import NUM_ROWS, OneDnnWeight, PackedLinear, pays
from serve_app.kernels.cpu import compiling, products
from serve_app.kernels.cpu.products import MAX_ROWS, MIDDLE, ROWS, LaidOut, WholeRows
from serve_app.kernels.openmp import libgomp
from serve_app.kernels.torch_private import lay_out

HAS_KERNEL = products._kernel() is not None
needs_kernel = pytest.mark.skipif(not HAS_KERNEL, reason="a CPU without AVX512-BF16, or with AMX")
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
SIZES = [(64, 64), (80, 128), (448, 896), (208, 576), (192, 4864)]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


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
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 12, 13, 29, ROWS, 2 * ROWS + 7])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_are_right(outputs: int, inputs: int, num_rows: int, has_bias: bool) -> None:
    kept, weight, bias = made(outputs, inputs, has_bias=has_bias)
    assert kept.ours is not None
    x = drawn(num_rows, inputs, seed=3)
    found, expected = kept.ours(x), exact(x, weight, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-3 * float(expected.abs().max()))
    assert torch.equal(kept(x), found), "it is this kernel that computes"


@needs_kernel
def test_a_row_gets_the_same_bits_in_any_company() -> None:
    kept, *_ = made(448, 896, has_bias=True)
    x = drawn(200, 896)
    together = kept(x)
    for first, count in ((0, 1), (3, 4), (10, 7), (31, 29), (57, 100)):
        assert torch.equal(kept(x[first : first + count]), together[first : first + count])


@needs_kernel
def test_one_thread_alone_gives_the_same_bits_as_a_team(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, *_ = made(448, 896, has_bias=True)
    x = drawn(40, 896)
    together = kept(x)
    monkeypatch.setattr(products, "SHORT", 1 << 40)
    assert torch.equal(kept(x), together)


@needs_kernel
@pytest.mark.parametrize("outputs", [64, 448, 1024])
def test_any_number_of_threads_gives_the_same_bits(outputs: int) -> None:
    kept, weight, bias = made(outputs, 896, has_bias=True)
    x = drawn(3 * ROWS + 20, 896)
    assert kept.ours is not None
    found = []
    for num_threads in (1, 2, 3, 5, 16):
        torch.set_num_threads(num_threads)
        found.append(kept.ours(x))
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0].double(), exact(x, weight, bias), rtol=2**-8, atol=0.05)


@needs_kernel
def test_small_weights_are_laid_out_where_our_kernel_reads_them() -> None:
    small, tiny, odd = drawn(256, 128), drawn(64, 64), drawn(250, 128)
    assert [pays(each) for each in (small, tiny, odd, small.float())] == [True, False, False, False]
    packed = PackedLinear(small)
    assert isinstance(packed.kept, OneDnnWeight)
    assert packed.kept.ours is not None
    x = drawn(3, 128)
    torch.testing.assert_close(packed(x).double(), exact(x, small, None), rtol=2**-7, atol=0.1)


@needs_kernel
def test_rows_may_lie_apart_from_each_other() -> None:
    kept, weight, _ = made(64, 64)
    wide = drawn(5, 200)
    x = wide[:, 40:104]
    torch.testing.assert_close(kept(x).double(), exact(x, weight, None), rtol=2**-7, atol=0.1)


@needs_kernel
def test_inputs_of_another_size_are_refused_and_not_read() -> None:
    kept, *_ = made(448, 896)
    for inputs in (448, 900):
        with pytest.raises(RuntimeError):
            kept(drawn(3, inputs))


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
        assert kept.ours is None or not kept.ours.takes(x)
        torch.testing.assert_close(kept(x).double(), exact(x, weight, None), rtol=2**-7, atol=0.5)


@needs_onednn
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 66), (72, 64), (64, 63), (1152, 1028)])
def test_sizes_that_it_does_not_divide_are_left_to_onednn(outputs: int, inputs: int) -> None:
    kept, weight, _ = made(outputs, inputs)
    assert kept.ours is None
    x = drawn(3, inputs)
    torch.testing.assert_close(kept(x).double(), exact(x, weight, None), rtol=2**-7, atol=0.5)


@needs_onednn
@pytest.mark.parametrize("num_threads", [1, 4, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(192, 4864), (128, 192)])
def test_however_many_threads_products_are_right_and_ours(outputs: int, inputs: int, num_threads: int) -> None:
    """For many of them oneDNN lays small weights out in smaller blocks, if it may."""
    torch.set_num_threads(num_threads)
    kept, weight, bias = made(outputs, inputs, has_bias=True)
    assert (kept.ours is not None) == HAS_KERNEL
    for rows in (7, MAX_ROWS + 1):
        x = drawn(rows, inputs)
        torch.testing.assert_close(kept(x).double(), exact(x, weight, bias), rtol=2**-7, atol=0.5)
    assert torch.get_num_threads() == num_threads
    assert torch.equal(kept.dense, weight)


@needs_onednn
def test_wider_numbers_are_left_to_onednn() -> None:
    packed = lay_out(torch.randn(64, 64), NUM_ROWS)
    assert LaidOut.find(packed, None) is None


@needs_kernel
def test_a_weight_that_lies_otherwise_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = OneDnnWeight(drawn(128, 64), None).packed
    other = drawn(128, 64, seed=5)
    monkeypatch.setattr(torch.ops.mkldnn, "data_ptr", lambda _: other.data_ptr())
    assert LaidOut.find(packed, None) is None


@pytest.mark.skipif(libgomp() is None, reason="needs torch's libgomp")
def test_where_no_kernel_can_be_made_onednn_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise RuntimeError("LLVM ended")

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "amx_tile": False})
    monkeypatch.setattr(compiling.Kernel, "__init__", refuse)
    assert products._kernel.__wrapped__() is None
    assert "LLVM ended" in caplog.text


has_whole_kernel = pytest.mark.skipif(
    products.whole_kernel(torch.float32) is None, reason="a CPU without AVX512-VNNI, or with AMX"
)


@has_whole_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 6, 13, ROWS, ROWS + 1, 3 * ROWS + 5])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (7, 33), (40, 512), (200, 4864)])
def test_sums_of_whole_numbers_are_exact(outputs: int, inputs: int, num_rows: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(-127, 128, (outputs, inputs), generator=draw).to(torch.int8)
    weight = WholeRows(numbers, torch.full((outputs,), 2.0**-12))
    x = torch.randint(-127, 128, (num_rows, inputs), generator=draw)
    bias = torch.randint(-9, 9, (outputs,), generator=draw).float()
    shifted = F.pad(x + MIDDLE, (0, weight.num_inputs - inputs), value=77).to(torch.uint8)
    found = weight(shifted, torch.full((num_rows, 1), 0.5), bias, dtype)
    expected = (x.double() @ numbers.double().T) * 2.0**-13 + bias
    assert torch.equal(found, expected.float().to(dtype))
    assert torch.equal(weight.stored[0], numbers)
    assert weight.stored[1].tolist() == [2.0**-12] * outputs


@has_whole_kernel
def test_the_largest_whole_numbers_do_not_overflow_on_the_way() -> None:
    numbers = torch.full((16, 4864), 127, dtype=torch.int8)
    weight = WholeRows(numbers, torch.ones(16))
    x = torch.full((1, weight.num_inputs), 255, dtype=torch.uint8)
    found = weight(x, torch.ones(1, 1), None, torch.float32)
    assert found.tolist() == [[127.0 * 127 * 4864] * 16]
