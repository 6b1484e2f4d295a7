"""How much memory a model's weights take once they are loaded, known from its configuration before any is read."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from serve_app.engine.decoder.errors import ModelNotSupported
from serve_app.engine.decoder.judgement import Judged
from serve_app.engine.decoder.precision import choose_dtype
from serve_app.engine.quantized.receiving import await_weights
from serve_app.engine.quantized.rounding import Bits


def weight_bytes(judged: Judged, dtype: torch.dtype, bits: Bits | None = None) -> int:
    """What the weights take in these numbers, whatever they are stored in: quantised ones are dequantised, tied ones
    are there once, towers that are dropped not at all.

    bits: of the weights of linears; None is those of the numbers

    Raises ModelNotSupported where the model wants a package that is not there, or has a shape that no kernel takes.
    """
    model = shapes_of(judged, dtype)
    if bits is None:
        return held_bytes(model)
    waiting = await_weights(model, bits)
    for each in waiting:
        each.check()
    shown = sum(each.get_parameter("weight").nbytes for each in waiting)
    return held_bytes(model) - shown + sum(each.num_bytes for each in waiting)


def weight_bytes_on_cpu(judged: Judged, dtype: str, bits: Bits | None = None) -> int:
    """The same on the CPU that we run on, in the numbers that loading would choose. Raises ModelNotSupported."""
    return weight_bytes(judged, choose_dtype(dtype, judged.dtype, torch.device("cpu")), bits)


def shapes_of(judged: Judged, dtype: torch.dtype | None = None) -> nn.Module:
    """The model without its numbers. Raises ModelNotSupported where it wants a package that is not there."""
    try:
        with torch.device("meta"):
            model: nn.Module = judged.kind._from_config(
                deepcopy(judged.config), dtype=dtype, attn_implementation="eager"
            )
    except ImportError as error:
        raise ModelNotSupported(f"{judged.config.model_type}: {_package_of(error)}") from error
    return model


def held_bytes(module: nn.Module) -> int:
    """What the parameters and buffers of a module take."""
    return sum(tensor.numel() * tensor.itemsize for tensor in (*module.parameters(), *module.buffers()))


def _package_of(error: ImportError) -> str:
    """Which package a model wants, in words shorter than transformers' own."""
    if "timm" in str(error):
        return "it needs the packages timm and pillow, even for text alone: pip install timm pillow"
    return f"it needs a package that is not installed: {str(error).strip().splitlines()[0]}"
