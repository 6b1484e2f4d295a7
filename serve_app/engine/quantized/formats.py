"""The table of supported quantised checkpoint formats. Every other format is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from serve_app.engine.decoder.errors import ModelNotSupported
from serve_app.engine.quantized import decoding, keeping
from serve_app.engine.quantized.decoding import Parts
from serve_app.engine.quantized.linear import Rounded

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


IGNORED = (".input_scale", ".activation_scale", ".input_zero_point", ".k_scale", ".v_scale", ".weight_format",
           ".output_scale", ".kv_scale", ".input_scale_ub")  # fmt: skip
"""Endings of what only quantised activations or caches would need."""

BNB_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")


def formats_of(settings: Mapping[str, Any], model_type: str) -> tuple[Format, ...]:
    """The formats that a `quantization_config` announces.

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
        decode=partial(decoding.decode_scaled, block=tuple(block) if block else None),
        keep=keeping.keep_scaled,
    )


_PACKED = Format(
    main=".weight_packed",
    signs=(".weight_scale",),
    parts=(".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
    decode=decoding.decode_packed,
    keep=keeping.keep_packed,
)
_BNB_INT8 = Format(main=".weight", signs=(".SCB",), parts=(".SCB",), decode=decoding.decode_bnb_int8,
                   keep=keeping.keep_bnb_int8)  # fmt: skip
_BNB_4BIT = Format(
    main=".weight",
    signs=BNB_STATES,
    parts=(".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", *BNB_STATES),
    decode=decoding.decode_bnb_4bit,
)
_MXFP4 = Format(main="_blocks", signs=("_scales",), parts=("_scales",), decode=decoding.decode_mxfp4, becomes="")


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
    offset = 1 if kind == "gptq" else 0
    return Format(
        main=".qweight",
        signs=(".scales",),
        parts=(".qzeros", ".scales", ".g_idx"),
        decode=partial(decoding.decode_gptq, bits=bits, zero_offset=offset),
        keep=partial(keeping.keep_gptq, zero_offset=offset) if bits == 4 else None,
    )


def _awq(settings: Mapping[str, Any], model_type: str) -> Format:
    bits = settings.get("bits") or settings.get("w_bit") or 4
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if bits != 4 or version != "gemm":
        raise _refused(model_type, f"awq of {bits} bits in version {version}")
    parts = (".qzeros", ".scales")
    return Format(main=".qweight", signs=(".scales",), parts=parts, decode=decoding.decode_awq,
                  keep=keeping.keep_awq)  # fmt: skip


def _refused(model_type: str, what: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"{model_type}: {what} is not supported (quantised weights that are: {SERVED}); serve the checkpoint it was"
        " made from, or save it dequantised with the library that made it"
    )
