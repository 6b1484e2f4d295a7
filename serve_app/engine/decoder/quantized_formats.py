"""The supported formats of quantised checkpoints, and how their weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from serve_app.core.weight_files import weight_files
from serve_app.engine.decoder.quantized_linear import (
    GROUPS,
    MIDDLE,
    Bits,
    Int4Groups,
    Int8Rows,
    Rounded,
)
from serve_app.engine.decoder.text_part import ModelNotSupported

Parts = Mapping[str, Tensor]
"""The tensors of one weight by their endings."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the columns of eight lie in a word, lowest bits first
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign; the sign is the highest of four bits
E8M0_BIAS = 127


def decode_scaled(parts: Parts, *, block: tuple[int, int] | None = None) -> Tensor:
    """float8 or int8 times a scale: one for all, per output, per group of inputs, or per block.

    `.weight` [out, in]; `.weight_scale` or `.weight_scale_inv`; `.weight_zero_point` where 0 is not stored as 0.
    block: rows and columns that share a scale, where the last ones need not be whole; of a scale of another shape, what
        divides the weight by it

    Sources: compressed-tensors (int-, float- and naive-quantized), DeepSeek-V3's README_WEIGHTS.md.
    """
    weight = parts[".weight"].float()
    scale = parts[".weight_scale_inv"] if ".weight_scale_inv" in parts else parts[".weight_scale"]
    if ".weight_zero_point" in parts:
        weight = weight - _spread(parts[".weight_zero_point"].float(), weight.shape, block)
    return weight * _spread(scale.float(), weight.shape, block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """(numbers - zeros) · scales, those of the group that an input is in.

    numbers: [out, in], unsigned, of so many bits;  scales, zeros: [out, groups] float32
    groups:  [in], the group of each input; None where a group is of inputs side by side
    """

    numbers: Tensor
    bits: int
    scales: Tensor
    zeros: Tensor
    groups: Tensor | None

    @property
    def weight(self) -> Tensor:
        """[out, in] float32"""
        zeros, scales = (self._spread(each) for each in (self.zeros, self.scales))
        return (self.numbers.float() - zeros) * scales

    def _spread(self, each: Tensor) -> Tensor:
        return _spread(each, self.numbers.shape, None) if self.groups is None else each[:, self.groups]

    @property
    def kept(self) -> Int4Groups | None:
        """As the kernel takes it; None where it does not: other bits, other groups, or inputs in another order."""
        inputs, count = self.numbers.shape[1], self.scales.shape[1]
        size = inputs // count
        is_in_order = self.groups is None or torch.equal(self.groups, torch.arange(inputs) // size)
        if self.bits != 4 or not is_in_order or size not in GROUPS or size * count != inputs:
            return None
        scales = self.scales.bfloat16()
        offsets = ((MIDDLE - self.zeros) * scales.float()).bfloat16()
        numbers = self.numbers.to(torch.uint8).contiguous()
        return Int4Groups(numbers=numbers, scales=scales.contiguous(), offsets=offsets.contiguous())


def read_packed(parts: Parts) -> Grouped:
    """compressed-tensors' pack-quantized: signed numbers of 2, 4 or 8 bits in words along the inputs.

    `.weight_packed` [out, words] int32, each number with an offset of half its range; `.weight_shape`;
    `.weight_scale` [out, groups]; `.weight_zero_point` [words, groups], packed along the outputs;
    `.weight_g_idx` [in], the group of each input.
    """
    rows, columns = parts[".weight_shape"].tolist()
    packed = parts[".weight_packed"]
    bits = next((bits for bits in (2, 4, 8) if -(-columns * bits // 32) == packed.shape[1]), None)
    if bits is None:
        raise ValueError(f"{columns} numbers in {packed.shape[1]} words are not of 2, 4 or 8 bits")
    scales = parts[".weight_scale"].float().reshape(rows, -1)
    zeros = torch.full_like(scales, 1 << (bits - 1))
    if ".weight_zero_point" in parts:
        zeros = unpack_words(parts[".weight_zero_point"].T.contiguous(), bits)[:, :rows].T.float()
    groups = parts[".weight_g_idx"].long() if ".weight_g_idx" in parts else None
    numbers = unpack_words(packed, bits)[:, :columns]
    return Grouped(numbers=numbers, bits=bits, scales=scales, zeros=zeros, groups=groups)


def read_gptq(parts: Parts, *, bits: int, zero_offset: int) -> Grouped:
    """GPTQ: unsigned numbers in words along the inputs, a scale and a zero per group of inputs and output.

    `.qweight` [words, out]; `.qzeros` [groups, words]; `.scales` [groups, out]; `.g_idx` [in]
    zero_offset: what was taken from a zero before it was stored: 1 in AutoGPTQ's format, 0 in gptq_v2
    """
    numbers = unpack_words(parts[".qweight"].T.contiguous(), bits)
    scales = parts[".scales"].float().T
    zeros = (unpack_words(parts[".qzeros"], bits)[:, : len(scales)] + zero_offset) & ((1 << bits) - 1)
    groups = parts[".g_idx"].long() if ".g_idx" in parts else None
    return Grouped(numbers=numbers, bits=bits, scales=scales, zeros=zeros.T.float(), groups=groups)


def read_awq(parts: Parts) -> Grouped:
    """AWQ's gemm version: numbers of 4 bits in words along the outputs, in an order of their own.

    `.qweight` [in, words]; `.qzeros` [groups, words]; `.scales` [groups, out]
    """
    numbers, zeros = (_reordered(unpack_words(parts[name], 4)).T for name in (".qweight", ".qzeros"))
    return Grouped(numbers=numbers, bits=4, scales=parts[".scales"].float().T, zeros=zeros.float(), groups=None)


def decode_bnb_int8(parts: Parts) -> Tensor:
    """bitsandbytes' LLM.int8() (arXiv 2208.07339): a row's largest absolute value is 127."""
    return parts[".weight"].float() * parts[".SCB"].float()[:, None] / 127


def decode_bnb_4bit(parts: Parts) -> Tensor:
    """bitsandbytes' nf4 and fp4 (arXiv 2305.14314): an entry of a table, times the largest value of its block.

    `.weight` uint8, two entries per byte, the first in the high bits; `.absmax` per block, or, quantised in turn,
    bytes with a table, blocks and an offset of their own; `.quant_state…` is JSON in bytes.
    """
    [state] = [json.loads(bytes(value.tolist())) for name, value in parts.items() if ".quant_state." in name]
    packed = parts[".weight"].flatten()
    entries = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
    largest = parts[".weight.absmax"]
    if ".weight.nested_absmax" in parts:
        nested = parts[".weight.nested_absmax"].float().repeat_interleave(state["nested_blocksize"])[: len(largest)]
        largest = parts[".weight.nested_quant_map"].float()[largest.long()] * nested + state["nested_offset"]
    shape = state["shape"]
    count = torch.Size(shape).numel()
    scale = largest.float().repeat_interleave(state["blocksize"])[:count]
    return (parts[".weight.quant_map"].float()[entries[:count]] * scale).reshape(shape)


def decode_mxfp4(parts: Parts) -> Tensor:
    """gpt-oss's experts in MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 numbers with one power of two.

    `_blocks` [experts, out, blocks, 16] uint8, the first number in the low bits; `_scales` [experts, out, blocks]
    Returns [experts, in, out], as transformers keeps them.
    """
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    packed = parts["_blocks"]
    numbers = table[torch.stack([packed & 15, packed >> 4], dim=-1).long()].flatten(-2)  # [experts, out, blocks, 32]
    powers = torch.exp2(parts["_scales"].float() - E8M0_BIAS)
    return (numbers * powers[..., None]).flatten(2).transpose(1, 2).contiguous()


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits along the last dimension of int32 words, lowest bits first: [rows, words · 32/bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _reordered(numbers: Tensor) -> Tensor:
    """AWQ's numbers in the order of their columns."""
    words: Tensor = numbers.unflatten(1, (-1, len(AWQ_ORDER)))
    return words[..., torch.tensor(AWQ_ORDER)].flatten(1)


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """Spread one scale, or one of each row, group or block, over all numbers."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() == 1:
        scale = scale[:, None]
    if block is None or scale.shape[-2:] != tuple(
        -(-size // each) for size, each in zip(shape[-2:], block, strict=True)
    ):
        if shape[-2] % scale.shape[-2] or shape[-1] % scale.shape[-1]:
            raise ValueError(f"scales of shape {list(scale.shape)} do not divide a weight of {list(shape)}")
        block = (shape[-2] // scale.shape[-2], shape[-1] // scale.shape[-1])
    wide = scale.repeat_interleave(block[0], dim=-2).repeat_interleave(block[1], dim=-1)
    return wide[..., : shape[-2], : shape[-1]]


def keep_scaled(parts: Parts) -> Int8Rows | None:
    """int8 with one scale or one per output, and none but 0 stored as 0."""
    numbers = parts[".weight"]
    scales = parts.get(".weight_scale")
    if numbers.dtype != torch.int8 or scales is None or ".weight_zero_point" in parts:
        return None
    if scales.numel() not in (1, len(numbers)):
        return None
    return Int8Rows(numbers=numbers, scales=scales.float().flatten().expand(len(numbers)).contiguous())


def keep_bnb_int8(parts: Parts) -> Int8Rows:
    """bitsandbytes' LLM.int8()."""
    return Int8Rows(numbers=parts[".weight"], scales=parts[".SCB"].float() / 127)


SERVED = (
    "fp8, compressed-tensors (int-, float-, naive- and pack-quantized), gptq (2, 4, 8 bits), awq (gemm), bitsandbytes,"
    " mxfp4"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How one kind of weight is stored.

    main:    ending of the tensor a weight is known by, where one of `signs` is beside it
    parts:   endings of the others that it is made of
    becomes: the ending under which the model knows it
    keep:    gives the weight as it is stored, where a kernel computes with such; None where none does
    """

    main: str
    signs: tuple[str, ...]
    parts: tuple[str, ...]
    decode: Callable[[Parts], Tensor]
    becomes: str = ".weight"
    keep: Callable[[Parts], Rounded | None] | None = None


def _grouped(main: str, signs: tuple[str, ...], parts: tuple[str, ...], read: Callable[[Parts], Grouped]) -> Format:
    return Format(
        main=main,
        signs=signs,
        parts=parts,
        decode=lambda found: read(found).weight,
        keep=lambda found: read(found).kept,
    )


IGNORED = (".input_scale", ".activation_scale", ".input_zero_point", ".k_scale", ".v_scale", ".weight_format",
           ".output_scale", ".kv_scale", ".input_scale_ub")  # fmt: skip
"""Endings of what only quantised activations or caches would need."""

BNB_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")


def formats_of(settings: Mapping[str, Any], model_type: str) -> tuple[Format, ...]:
    """Return the formats that a `quantization_config` announces.

    Raises ModelNotSupported, which names the method and what would help.
    """
    nested = settings.get("quantization_config")
    settings = nested if isinstance(nested, dict) else settings
    method = str(settings.get("quant_method") or _method_of(settings) or "")
    match method:
        case "fp8" | "fbgemm_fp8":
            return (_scaled(settings.get("weight_block_size")),)
        case "compressed-tensors":
            return _compressed_tensors(settings, model_type)
        case "gptq":
            return (_gptq(settings, model_type),)
        case "awq":
            return (_awq(settings, model_type),)
        case "bitsandbytes":
            return (_BNB_INT8, _BNB_4BIT)
        case "mxfp4":
            return (_MXFP4,)
    raise _refused(model_type, f"quant_method {method or None!r}")


# Settings that one method alone has, for files whose tools do not name it.
_OWN_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "bitsandbytes": ("load_in_8bit", "load_in_4bit", "_load_in_8bit", "_load_in_4bit"),
    "compressed-tensors": ("config_groups",),
    "fp8": ("weight_block_size", "activation_scheme"),
    "awq": ("w_bit", "zero_point"),
    "gptq": ("desc_act", "damp_percent"),
}


def _method_of(settings: Mapping[str, Any]) -> str | None:
    for method, own in _OWN_SETTINGS.items():
        if any(name in settings for name in own):
            return method
    return None


def _scaled(block: Any) -> Format:
    return Format(
        main=".weight",
        signs=(".weight_scale", ".weight_scale_inv"),
        parts=(".weight_scale", ".weight_scale_inv", ".weight_zero_point"),
        decode=partial(decode_scaled, block=tuple(block) if block else None),
        keep=keep_scaled,
    )


_PACKED = _grouped(
    ".weight_packed",
    (".weight_scale",),
    (".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
    read_packed,
)
_BNB_INT8 = Format(main=".weight", signs=(".SCB",), parts=(".SCB",), decode=decode_bnb_int8,
                   keep=keep_bnb_int8)  # fmt: skip
_BNB_4BIT = Format(
    main=".weight",
    signs=BNB_STATES,
    parts=(".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", *BNB_STATES),
    decode=decode_bnb_4bit,
)
_MXFP4 = Format(main="_blocks", signs=("_scales",), parts=("_scales",), decode=decode_mxfp4, becomes="")


def _compressed_tensors(settings: Mapping[str, Any], model_type: str) -> tuple[Format, ...]:
    groups = [each for each in (settings.get("config_groups") or {}).values() if isinstance(each, dict)]
    found = {str(group.get("format") or settings.get("format") or "dense") for group in groups}
    unknown = found - {"dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized"}
    if unknown:
        raise _refused(model_type, f"compressed-tensors' format {', '.join(sorted(unknown))}")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refused(model_type, "compressed-tensors' sparsity_config")
    if settings.get("transform_config"):
        raise _refused(model_type, "compressed-tensors' transform_config")
    status = settings.get("quantization_status") or "compressed"
    if status != "compressed":
        raise _refused(model_type, f"compressed-tensors' quantization_status {status}")
    blocks = {_block((group.get("weights") or {}).get("block_structure")) for group in groups} - {()}
    if len(blocks) > 1:
        raise _refused(model_type, "compressed-tensors with blocks of several sizes")
    return (_PACKED, _scaled(blocks.pop() if blocks else None))


def _block(said: Any) -> tuple[int, ...]:
    """Rows and columns of a block, of which older files say "128x128"."""
    return tuple(int(each) for each in (said.split("x") if isinstance(said, str) else said or ()))


def _gptq(settings: Mapping[str, Any], model_type: str) -> Format:
    bits, kind = settings.get("bits"), settings.get("checkpoint_format") or "gptq"
    if bits not in (2, 4, 8) or kind not in ("gptq", "gptq_v2"):
        raise _refused(model_type, f"gptq of {bits} bits in checkpoint_format {kind}")
    read = partial(read_gptq, bits=bits, zero_offset=1 if kind == "gptq" else 0)
    return _grouped(".qweight", (".scales",), (".qzeros", ".scales", ".g_idx"), read)


def _awq(settings: Mapping[str, Any], model_type: str) -> Format:
    bits = settings.get("bits") or settings.get("w_bit") or 4
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if bits != 4 or version != "gemm":
        raise _refused(model_type, f"awq of {bits} bits in version {version}")
    return _grouped(".qweight", (".scales",), (".qzeros", ".scales"), read_awq)


def _refused(model_type: str, what: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"{model_type}: {what} is not supported (quantised weights that are: {SERVED}); serve the checkpoint it was"
        " made from, or save it dequantised with the library that made it"
    )


STORED_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8", "I16", "I32"})
"""Weights of these types are never plain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight, read and decoded by `weight[...]`, as a slice of a safetensors file is.

    slices: of the files, by the endings of their names; a plain weight is one under ""
    """

    name: str
    slices: Mapping[str, Any]
    format: Format | None

    def __getitem__(self, index: Any) -> Tensor:
        if self.format is None:
            plain: Tensor = self.slices[""][index]
            return plain
        with self._refusing():
            parts = self._parts()
            with parts[self.format.main].device:  # an outline's parts have no numbers, and no tables either
                return self.format.decode(parts)[index]

    def keep(self) -> Rounded | None:
        """Return the weight in few bits as it is stored, if a kernel computes with that form."""
        if self.format is None or self.format.keep is None:
            return None
        with self._refusing():
            return self.format.keep(self._parts())

    def _parts(self) -> dict[str, Tensor]:
        return {ending: each[...] for ending, each in self.slices.items()}

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, IndexError, RuntimeError) as error:
            raise ModelNotSupported(f"tensor {self.name} cannot be dequantised: {error}") from error


def kept_in(weights: Mapping[str, Weight], bits: Bits) -> Callable[[str], Rounded | None]:
    """Return what finds a weight that is stored in so many bits already, so that it is not rounded again."""
    wanted = Int8Rows if bits == "int8" else Int4Groups

    def kept(name: str) -> Rounded | None:
        rounded = weights[name].keep() if name in weights else None
        return rounded if isinstance(rounded, wanted) else None

    return kept


def open_slices(folder: Path) -> dict[str, Any]:
    """Return the tensors of a folder's weight files by their names, none of them read yet."""
    slices: dict[str, Any] = {}
    for file in weight_files(folder):
        handle = safe_open(file, framework="pt")  # slices keep it open
        slices |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (no mapping)
    return slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A stored tensor's shape and type in the place of its numbers, which are not read."""

    stored: Any

    def get_dtype(self) -> str:
        return str(self.stored.get_dtype())

    def get_shape(self) -> list[int]:
        return list(self.stored.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        shape = self.get_shape()
        empty: Tensor = self.stored[:0] if shape else self.stored[...]
        return torch.empty(shape, dtype=empty.dtype, device="meta")[index]


def outlines(slices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outlines of tensors, but read those few numbers that say how another is stored."""
    return {
        name: each if name.endswith((".weight_shape", *BNB_STATES)) else Outline(stored=each)
        for name, each in slices.items()
    }


def as_plain(slices: Mapping[str, Any], formats: Iterable[Format]) -> dict[str, Weight]:
    """Return the weights of a quantised checkpoint by the names that a plain one would have.

    Raises ModelNotSupported where a tensor is stored in few bits, but not as the formats say.
    """
    weights: dict[str, Weight] = {}
    taken: set[str] = set()
    for form in formats:
        for name in sorted(set(slices) - taken):
            stem = name.removesuffix(form.main)
            if stem == name or not any(stem + sign in slices for sign in form.signs):
                continue
            own = {end: slices[stem + end] for end in (form.main, *form.parts) if stem + end in slices}
            weights[stem + form.becomes] = Weight(name=name, slices=own, format=form)
            taken |= {stem + end for end in own}
    for name in sorted(set(slices) - taken):
        if not name.endswith(IGNORED):
            _check_plain(name, slices[name])
            weights[name] = Weight(name=name, slices={"": slices[name]}, format=None)
    return weights


def _check_plain(name: str, stored: Any) -> None:
    if stored.get_dtype() in STORED_DTYPES and len(stored.get_shape()) > 1:
        raise ModelNotSupported(
            f"tensor {name} is {stored.get_dtype()}, and no scale is beside it under a name that is known"
        )
