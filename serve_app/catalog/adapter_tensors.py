"""Checks that the tensors of an adapter are LoRA pairs as its configuration describes them."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.catalog.adapter_config import AdapterConfig
from serve_app.catalog.errors import CatalogError
from serve_app.catalog.headers import TensorInfo

MODULE_PREFIX = "base_model.model."
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
MAGNITUDE = ".lora_magnitude_vector"
DTYPES = frozenset({"float16", "bfloat16", "float32"})

_FORMS: Mapping[str, str] = {LORA_A: LORA_A, LORA_B: LORA_B, MAGNITUDE: MAGNITUDE, f"{MAGNITUDE}.weight": MAGNITUDE}


def check_tensors(tensors: Mapping[str, TensorInfo], config: AdapterConfig) -> int:
    """Check names, pairs, shapes and dtypes; return the largest rank.

    lora_A [rank, inputs], lora_B [outputs, rank], lora_magnitude_vector [outputs] with DoRA and only with it.
    Raises CatalogError, which names the tensor.
    """
    modules = _by_module(tensors)
    if not modules:
        raise CatalogError("adapter_model.safetensors has no tensors")
    return max(_check_module(module, forms, config=config) for module, forms in sorted(modules.items()))


def _by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in sorted(tensors.items()):
        form = next((form for form in _FORMS if name.endswith(form)), None)
        if form is None or not name.startswith(MODULE_PREFIX) or len(name) <= len(MODULE_PREFIX) + len(form):
            raise CatalogError(
                f"tensor {name!r} is not supported; allowed are {MODULE_PREFIX}<module> with {LORA_A}, {LORA_B} "
                f"or {MAGNITUDE}"
            )
        if info.dtype not in DTYPES:
            raise CatalogError(f"tensor {name!r} is {info.dtype}; allowed are {', '.join(sorted(DTYPES))}")
        forms = modules.setdefault(name[len(MODULE_PREFIX) : -len(form)], {})
        if _FORMS[form] in forms:
            raise CatalogError(f"tensor {name!r} is there twice, with and without .weight")
        forms[_FORMS[form]] = info
    return modules


def _check_module(module: str, forms: Mapping[str, TensorInfo], *, config: AdapterConfig) -> int:
    for form in (LORA_A, LORA_B):
        if form not in forms:
            raise CatalogError(f"tensor {MODULE_PREFIX + module + form!r} is missing")
        if len(forms[form].shape) != 2 or 0 in forms[form].shape:
            raise CatalogError(
                f"tensor {MODULE_PREFIX + module + form!r} has the shape {list(forms[form].shape)}; "
                "only linear layers, which have two dimensions, are supported"
            )
    rank = config.rank_of(module)
    inner_a, inner_b = forms[LORA_A].shape[0], forms[LORA_B].shape[1]
    if inner_a != rank or inner_b != rank:
        raise CatalogError(
            f"module {module!r}: lora_A has rank {inner_a} and lora_B rank {inner_b}; adapter_config.json says {rank}"
        )
    _check_magnitude(module, forms, use_dora=config.use_dora)
    return rank


def _check_magnitude(module: str, forms: Mapping[str, TensorInfo], *, use_dora: bool) -> None:
    magnitude = forms.get(MAGNITUDE)
    if magnitude is None:
        if use_dora:
            raise CatalogError(f"tensor {MODULE_PREFIX + module + MAGNITUDE!r} is missing, which use_dora asks for")
        return
    if not use_dora:
        raise CatalogError(
            f"tensor {MODULE_PREFIX + module + MAGNITUDE!r} is there, but use_dora is not set in adapter_config.json"
        )
    if magnitude.shape != (forms[LORA_B].shape[0],):
        raise CatalogError(
            f"tensor {MODULE_PREFIX + module + MAGNITUDE!r} has the shape {list(magnitude.shape)}; "
            f"lora_B has {forms[LORA_B].shape[0]} outputs"
        )
