"""Linears in few bits compute what their numbers mean, each row for itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from serve_app.engine.decoder.quantized_linear import (
    BULK_ROWS,
    SEVEN_BITS,
    Bits,
    FbgemmRows,
    Int4Groups,
    Int8Rows,
    QuantisedLinear,
    VnniRows,
    check_fits,
    int8_kernel,
    join_linears,
    round_to,
)
from serve_app.engine.decoder.text_part import ModelNotSupported

SIZES = [(64, 96), (40, 32), (200, 512)]
NUM_ROWS = [1, 2, 5, 33, BULK_ROWS - 1, BULK_ROWS, 150]
BOTH: tuple[Bits, ...] = ("int8", "int4")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(bits: Bits, outputs: int, inputs: int, *, has_bias: bool = True, seed: int = 0) -> QuantisedLinear:
    bias = drawn(outputs, seed=seed + 1) if has_bias else None
    return QuantisedLinear(round_to(bits, drawn(outputs, inputs, seed=seed)), bias, dtype=torch.float32)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_int8_differs_from_its_dequantised_weight_by_the_rounding_of_inputs_alone(
    outputs: int, inputs: int, num_rows: int
) -> None:
    linear, x = make("int8", outputs, inputs), drawn(num_rows, inputs, seed=9)
    plain = nn.functional.linear(x, linear.weight, linear.bias)
    half_steps = x.abs().amax(1, keepdim=True) / SEVEN_BITS / 2
    bound = half_steps * linear.weight.abs().sum(1)
    assert bool(((linear(x) - plain).abs() <= bound * 1.001 + 1e-4).all())
    assert float((linear(x) - plain).norm() / plain.norm()) < 0.03


def test_without_amx_products_are_not_left_to_onednns_reference() -> None:
    """With AVX512-VNNI that took up to 300 times as long."""
    if torch.cpu.get_capabilities().get("amx_tile") or "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("another kernel is wanted here, or there is no other")
    found = int8_kernel()
    assert getattr(found, "func", found) in (VnniRows, FbgemmRows)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_int4_differs_from_its_dequantised_weight_by_bfloat16_alone(outputs: int, inputs: int, num_rows: int) -> None:
    linear, x = make("int4", outputs, inputs, has_bias=False), drawn(num_rows, inputs, seed=9)
    plain = x.bfloat16().float() @ linear.weight.T
    assert torch.allclose(linear(x), plain, rtol=2**-8, atol=1e-4)
    bias = drawn(outputs, seed=3)
    linear.bias = nn.Parameter(bias, requires_grad=False)
    assert torch.allclose(linear(x), plain + bias, rtol=2**-7, atol=0.05)


@pytest.mark.law("Few bits")
@pytest.mark.parametrize("bits", BOTH)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_row_is_the_same_to_its_last_bit_in_any_company(bits: Bits, outputs: int, inputs: int) -> None:
    linear = make(bits, outputs, inputs)
    largest = BULK_ROWS - 1 if bits == "int4" else 300
    x = drawn(largest, inputs, seed=4) * torch.logspace(-6, 6, largest)[:, None]
    together = linear(x)
    for begin, end in [(0, 1), (3, 4), (largest - 1, largest), (0, 2), (5, 12), (11, 27), (1, 34), (0, largest - 1)]:
        assert torch.equal(linear(x[begin:end]), together[begin:end])


@pytest.mark.parametrize("bits", BOTH)
def test_what_is_no_number_stays_in_its_row_and_shows_there(bits: Bits) -> None:
    linear, x = make(bits, 64, 96), drawn(6, 96)
    poisoned = x.clone()
    poisoned[1, 5], poisoned[3, 7], poisoned[4] = torch.nan, torch.inf, 1e38
    y = linear(poisoned)
    assert torch.equal(y[[0, 2, 5]], linear(x)[[0, 2, 5]])
    assert not torch.isfinite(y[1]).any()
    assert not torch.isfinite(y[3]).any()


@pytest.mark.parametrize("bits", BOTH)
def test_rows_of_zeros_give_the_bias_and_no_rows_give_none(bits: Bits) -> None:
    linear = make(bits, 64, 96)
    assert linear.bias is not None
    assert torch.equal(linear(torch.zeros(2, 3, 96)), linear.bias.expand(2, 3, -1))
    assert linear(torch.zeros(1, 0, 96)).shape == (1, 0, 64)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_the_bias_is_the_one_that_it_has_now(bits: Bits) -> None:
    linear, x = make(bits, 64, 128), torch.zeros(3, 128)
    for seed in range(2):  # a checkpoint's comes when the linear is there already
        linear.bias = nn.Parameter(drawn(64, seed=seed).bfloat16(), requires_grad=False)
        assert torch.equal(linear(x), linear.bias.float().expand(3, 64))
        assert torch.equal(linear(x.view(1, 3, 128)), linear.bias.float().expand(1, 3, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_comes_in_sixteen_bits_goes_in_sixteen_bits(dtype: torch.dtype) -> None:
    linear, x = make("int8", 64, 96), drawn(3, 96).to(dtype)
    assert torch.equal(linear(x), linear(x.float()).to(dtype))


def test_int8_is_exact_where_sums_are_the_largest_that_can_be() -> None:
    signs = torch.ones(2, 700)
    signs[1, ::2] = -1
    rows = Int8Rows(numbers=(signs * 127).to(torch.int8), scales=torch.tensor([1.0, 0.5]))
    linear = QuantisedLinear(rows, None, dtype=torch.float32)
    for x in (torch.ones(1, 700), -torch.ones(1, 700), signs[1:], -signs[1:]):
        assert torch.allclose(linear(x), x @ rows.weight.T, rtol=1e-5, atol=1e-2)


def test_int8_rounds_to_the_nearest_of_each_output() -> None:
    weight = drawn(9000, 24) * torch.logspace(-4, 4, 9000)[:, None]
    rounded = round_to("int8", weight)
    assert bool(((rounded.weight - weight).abs() <= rounded.scales[:, None] * 0.5001).all())
    assert bool((rounded.numbers.abs().amax(1) == 127).all())


def test_int4_rounds_to_the_nearest_of_each_group() -> None:
    weight = drawn(9000, 64) + 0.3
    rounded = round_to("int4", weight)
    scales = rounded.scales.float().repeat_interleave(32, dim=1)
    inside = (rounded.numbers > 0) & (rounded.numbers < 15)
    difference = (rounded.weight - weight).abs()
    assert bool((difference[inside] <= scales[inside] * 0.5001).all())
    assert float((difference / scales).max()) < 0.6  # a scale of 16 bits may end a little short


@pytest.mark.parametrize("bits", BOTH)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_what_a_kernel_packed_is_what_it_was_given(bits: Bits, outputs: int, inputs: int) -> None:
    rounded = round_to(bits, drawn(outputs, inputs))
    stored = QuantisedLinear(rounded, None, dtype=torch.float32).stored
    assert torch.equal(stored.numbers, rounded.numbers)
    assert torch.equal(stored.weight, rounded.weight)


@pytest.mark.parametrize("bits", BOTH)
def test_joined_linears_compute_what_each_did(bits: Bits) -> None:
    linears = [make(bits, outputs, 96, seed=outputs) for outputs in (64, 16, 48)]
    x = drawn(7, 96)
    assert torch.equal(join_linears(linears)(x), torch.cat([linear(x) for linear in linears], dim=1))


@pytest.mark.parametrize("bits", BOTH)
def test_its_frame_has_the_shape_and_takes_no_memory(bits: Bits) -> None:
    linear = make(bits, 64, 96)
    assert linear.frame.shape == linear.weight.shape
    assert linear.frame.dtype == linear.weight.dtype
    assert linear.frame.untyped_storage().nbytes() == 4
    assert [name for name, _ in linear.named_parameters()] == ["bias"]


def test_int4_refuses_a_shape_by_the_name_of_what_has_it() -> None:
    with pytest.raises(ModelNotSupported, match=r"the 48 of layers\.0\.o_proj \[64, 48\]; use int8"):
        check_fits("layers.0.o_proj", 64, 48)
    check_fits("layers.0.o_proj", 37, 64)


def test_groups_of_other_sizes_are_computed_with_as_they_are() -> None:
    numbers = torch.randint(0, 16, (64, 256), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for groups in (8, 4, 2, 1):
        scales, offsets = drawn(64, groups).abs().bfloat16(), drawn(64, groups, seed=1).bfloat16()
        rounded = Int4Groups(numbers=numbers, scales=scales, offsets=offsets)
        linear = QuantisedLinear(rounded, None, dtype=torch.float32)
        for num_rows in (3, BULK_ROWS):
            x = drawn(num_rows, 256)
            assert torch.allclose(linear(x), x.bfloat16().float() @ rounded.weight.T, rtol=2**-8, atol=1e-3)
