"""Our own norms, rotations and gates on CPUs give what torch gives, to a token alone what in company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.engine.cpu import tokens as kernels
from serve_app.engine.cpu.tokens import TokenKernels, token_kernels
from serve_app.engine.decoder import layer as layers
from serve_app.engine.decoder import norm as norms
from serve_app.engine.decoder.layer import Mlp, Rotation
from serve_app.engine.decoder.norm import Change, HeadNorms, RootMeanSquare, added_and_normed
from serve_app.engine.decoder.openmp import libgomp
from serve_app.engine.quantized import int8_kernels

pytestmark = pytest.mark.skipif(libgomp() is None, reason="needs torch's libgomp")

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NUM_TOKENS = (1, 7, 300)
"""So that one thread computes, and that several do."""


def found(dtype: torch.dtype) -> TokenKernels:
    made = token_kernels(dtype)
    assert made is not None
    return made


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has none."""
    for module in (layers, norms, int8_kernels):
        monkeypatch.setattr(module, "token_kernels", lambda _: None)


def close(ours: Tensor, theirs: Tensor) -> None:
    limit = TOLERANCES[ours.dtype]
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("size", [16, 48, 896, 1040])
def test_a_change_is_added_as_torch_adds_it_and_the_norm_is_that_of_the_sum(
    size: int, num_tokens: int, dtype: torch.dtype
) -> None:
    x, amount = drawn(num_tokens, size, dtype=dtype, seed=1) * 3, drawn(num_tokens, size, dtype=dtype, seed=2)
    weight, sums = drawn(size, seed=3) + 1, torch.add(x, amount, alpha=0.75)
    normed = added_and_normed(x, Change(amount=amount, factor=0.75), RootMeanSquare(weight, 1e-5))
    close(x, sums)
    close(normed, F.rms_norm(x.float(), (size,), weight, 1e-5).to(dtype))
    assert torch.equal(added_and_normed(x, None, RootMeanSquare(weight, 1e-5)), normed), "the stream has the sum"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("size", [16, 80, 4864])
def test_gates(size: int, num_tokens: int, dtype: torch.dtype) -> None:
    inputs = drawn(num_tokens, 2 * size, dtype=dtype) * 6
    gate, up = inputs.chunk(2, dim=-1)
    close(found(dtype).gate(inputs), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_gates_of_numbers_of_any_size(dtype: torch.dtype) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 20, -20, 90, -90, 3e4, -3e4, torch.inf, torch.nan] + [1.0] * 4)
    inputs = torch.cat([gate, torch.ones(16)])[None].to(dtype)
    close(torch.nan_to_num(found(dtype).gate(inputs), posinf=7), torch.nan_to_num(F.silu(inputs[:, :16]), posinf=7))
    assert torch.equal(found(dtype).gate(inputs).isnan(), F.silu(inputs[:, :16]).isnan())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (96, 64), (128, 128)])
def test_heads_are_turned_where_they_lie(dim: int, rotated: int, num_tokens: int, dtype: torch.dtype) -> None:
    joined = drawn(num_tokens, 9 * dim, dtype=dtype, seed=1)
    angles = drawn(num_tokens, 1, rotated // 2, seed=2)
    cos, sin = (torch.cat([first, second], dim=-1).to(dtype) for first, second in _waves(angles))
    heads = joined.view(num_tokens, 9, dim)[:, :7]
    rest, expected = joined[:, 7 * dim :].clone(), _turned(heads.float(), cos.float(), sin.float())
    turned = Rotation(cos=cos, sin=sin).turn(heads)
    close(turned, expected)
    assert turned.data_ptr() == joined.data_ptr()
    assert torch.equal(joined[:, 7 * dim :], rest), "what follows them stays"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_heads_are_normed_where_they_lie(dim: int, num_tokens: int, dtype: torch.dtype) -> None:
    """Queries with one weight and keys with another; what follows them stays."""
    joined, weights = drawn(num_tokens, 9 * dim, dtype=dtype, seed=1) * 3, drawn(2, dim, seed=2) + 1
    heads, rest = joined.view(num_tokens, 9, dim)[:, :7], joined[:, 7 * dim :].clone()
    expected = F.rms_norm(heads.float(), (dim,), None, 1e-5) * torch.cat([weights[:1]] * 5 + [weights[1:]] * 2)
    query, key = (RootMeanSquare(weight, 1e-5) for weight in weights)
    alone = heads[-1:, 4:6].clone()
    of_both = HeadNorms.find(query, key)
    assert of_both is not None
    assert of_both.change(heads, 5)
    close(heads, expected.to(dtype))
    assert torch.equal(joined[:, 7 * dim :], rest)
    assert of_both.change(alone, 1)
    assert torch.equal(alone, heads[-1:, 4:6]), "the same bits in any company"


def test_head_norms_that_differ_in_more_than_weights_or_have_no_kernel_are_computed_apart() -> None:
    weight, other = torch.ones(20), torch.ones(32)
    norm = RootMeanSquare(weight, 1e-5)
    assert HeadNorms.find(norm, RootMeanSquare(weight, 1e-6)) is None
    assert HeadNorms.find(norm, RootMeanSquare(other, 1e-5)) is None
    assert HeadNorms.find(norm, norms.CentredNorm(20, 1e-5)) is None
    of_both = HeadNorms.find(norm, norm)
    assert of_both is not None
    heads = drawn(3, 4, 20)
    assert not of_both.change(heads, 2)
    assert torch.equal(heads, drawn(3, 4, 20))


def _waves(angles: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(angles.cos(), angles.cos()), (-angles.sin(), angles.sin())]


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    turned = heads[..., :size] * cos + heads[..., :size].roll(size // 2, -1) * sin
    return torch.cat([turned, heads[..., size:]], dim=-1)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_token_gets_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    x, inputs = drawn(400, 896, dtype=dtype, seed=1), drawn(400, 1792, dtype=dtype, seed=2)
    norm = RootMeanSquare(drawn(896, seed=3), 1e-6)
    together, gates = norm(x), found(dtype).gate(inputs)
    for token in (0, 17, 399):
        assert torch.equal(norm(x[token : token + 1]), together[token : token + 1])
        assert torch.equal(found(dtype).gate(inputs[token : token + 1]), gates[token : token + 1])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_what_is_no_number_stays_with_its_token(dtype: torch.dtype) -> None:
    x = drawn(3, 64, dtype=dtype)
    x[1, 40] = torch.nan
    normed = RootMeanSquare(torch.ones(64), 1e-6)(x)
    assert normed.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.usefixtures("without")
def test_without_kernels_it_is_computed_by_torch() -> None:
    x, amount, weight = drawn(5, 48), drawn(5, 48, seed=1), drawn(48, seed=2)
    expected = F.rms_norm(x + amount * 0.5, (48,), weight, 1e-5)
    close(added_and_normed(x, Change(amount=amount, factor=0.5), RootMeanSquare(weight, 1e-5)), expected)
    mlp = Mlp(inputs=lambda inputs: inputs, activation=F.silu, output=lambda gated: gated)  # type: ignore[arg-type]
    close(mlp(x), F.silu(x[:, :24]) * x[:, 24:])


@pytest.mark.parametrize("size", [24, 40])
def test_sizes_of_no_whole_vectors_are_torchs(size: int) -> None:
    x, weight = drawn(5, size), drawn(size, seed=1)
    close(RootMeanSquare(weight, 1e-5)(x), F.rms_norm(x, (size,), weight, 1e-5))
    x = drawn(5, 2 * size)
    mlp = Mlp(inputs=lambda inputs: inputs, activation=F.silu, output=lambda gated: gated)  # type: ignore[arg-type]
    close(mlp(x), F.silu(x[:, :size]) * x[:, size:])


def test_kernels_that_compute_wrongly_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(_: TokenKernels, inputs: Tensor) -> Tensor:
        return inputs[:, : inputs.shape[1] // 2]

    monkeypatch.setattr(TokenKernels, "gate", wrong)
    assert kernels.token_kernels.__wrapped__(torch.float32) is None
    assert "the kernels in torch.float32 are wrong" in caplog.text


def test_where_none_can_be_made_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(_: object) -> TokenKernels:
        raise ImportError("no LLVM")

    monkeypatch.setattr(kernels, "_make", missing)
    assert kernels.token_kernels.__wrapped__(torch.float32) is None
    assert "no LLVM" in caplog.text


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_tokens_are_divided_by_their_largest_number_and_multiplied_again(num_tokens: int, dtype: torch.dtype) -> None:
    x, bias = drawn(num_tokens, 208, dtype=dtype) * 5, drawn(208, seed=1)
    divided, scales = found(dtype).divide(x, 127)
    expected = x.float().abs().amax(1, keepdim=True) / 127
    assert torch.equal(scales, expected)
    torch.testing.assert_close(divided, x.float() / expected, rtol=1e-6, atol=0)
    close(found(dtype).multiply(divided, scales, None), x)
    close(found(dtype).multiply(divided, scales, bias), (x.float() + bias).to(dtype))


def test_scales_of_nothing_and_of_what_is_no_number() -> None:
    x = torch.zeros(3, 48)
    x[1, 33], x[2, 47] = torch.nan, -torch.inf
    divided, scales = found(torch.float32).divide(x, 63)
    assert scales[0, 0] > 0
    assert not divided[0].any()
    assert scales.isfinite()[:, 0].tolist() == [True, False, False]
    assert found(torch.float32).multiply(torch.ones(3, 48), scales, None)[1].isnan().all()


@pytest.mark.usefixtures("without")
def test_scales_are_torchs_where_there_are_no_kernels() -> None:
    x, bias = drawn(3, 48, dtype=torch.bfloat16), drawn(48, seed=1)
    divided, scales = int8_kernels.divided_by_scales(x, 127)
    ours, our_scales = found(torch.bfloat16).divide(x, 127)
    assert torch.equal(scales, our_scales)
    torch.testing.assert_close(divided, ours, rtol=1e-6, atol=0)
    close(int8_kernels.times_scales(divided, scales, bias, x.dtype), (x.float() + bias).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_and_values_are_kept_bit_by_bit_at_their_places_alone(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**15), 2**15, (3, 96), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    joined = (bits.int() if dtype == torch.float32 else bits).view(dtype)  # numbers of no size, and none, too
    kept, before = torch.zeros(2, 9, 32, dtype=dtype), torch.zeros(9, 32, dtype=dtype)
    places = torch.tensor([7, 0, 4])
    found(dtype).keep((joined[:, 32:64], joined[:, 64:]), (kept[0], kept[1]), places)
    for begin, now in zip((32, 64), kept, strict=True):
        expected = before.index_copy(0, places, joined[:, begin : begin + 32])
        assert torch.equal(now.view(torch.int32), expected.view(torch.int32))
