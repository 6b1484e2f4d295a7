"""Checks that the tensors of an adapter are LoRA pairs as its configuration describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.headers import TensorInfo
from serve_app.core.adapters import AdapterConfig, Change

MODULE_PREFIX = "base_model.model."
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
MAGNITUDE = ".lora_magnitude_vector"
DTYPES = frozenset({"float16", "bfloat16", "float32"})

_FORMS: Mapping[str, str] = {LORA_A: LORA_A, LORA_B: LORA_B, MAGNITUDE: MAGNITUDE, f"{MAGNITUDE}.weight": MAGNITUDE}

# Parts of tensors' names that PEFT writes for what is not computed.
_NOT_COMPUTED: Mapping[str, str] = {
    ".lora_embedding_": "it changes an embedding",
    ".base_layer.": "it is a weight of the base, which PEFT saves beside LoRA of an embedding or of the output head",
    ".token_adapter.": "it replaces single tokens of an embedding",
}


def read_changes(tensors: Mapping[str, TensorInfo], config: AdapterConfig) -> dict[str, Change]:
    """Check names, pairs, shapes and dtypes; return what is done to each module, by its name.

    lora_A [rank, inputs], lora_B [outputs, rank], lora_magnitude_vector [outputs] with DoRA and only with it.
    Raises CatalogError, which names the tensor.
    """
    modules = _by_module(tensors)
    if not modules:
        raise CatalogError("adapter_model.safetensors has no tensors")
    return {module: _change(module, forms, config=config) for module, forms in sorted(modules.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """One tensor: its name in the file, and its shape."""

    name: str
    shape: tuple[int, ...]


def _by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, _Tensor]]:
    modules: dict[str, dict[str, _Tensor]] = {}
    for name, info in sorted(tensors.items()):
        form = next((form for form in _FORMS if name.endswith(form)), None)
        if form is None or not name.startswith(MODULE_PREFIX) or len(name) <= len(MODULE_PREFIX) + len(form):
            raise CatalogError(
                f"tensor {name!r} is not supported{_why(name)}; allowed are {MODULE_PREFIX}<module> with {LORA_A}, "
                f"{LORA_B} or {MAGNITUDE}"
            )
        if info.dtype not in DTYPES:
            raise CatalogError(f"tensor {name!r} is {info.dtype}; allowed are {', '.join(sorted(DTYPES))}")
        forms = modules.setdefault(name[len(MODULE_PREFIX) : -len(form)], {})
        if _FORMS[form] in forms:
            raise CatalogError(f"tensor {name!r} is there twice, with and without .weight")
        forms[_FORMS[form]] = _Tensor(name=name, shape=info.shape)
    return modules


def _why(name: str) -> str:
    return next((f", as {why}" for part, why in _NOT_COMPUTED.items() if part in name), "")


def _change(module: str, forms: Mapping[str, _Tensor], *, config: AdapterConfig) -> Change:
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
    return Change(
        rank=rank,
        inputs=forms[LORA_A].shape[1],
        outputs=forms[LORA_B].shape[0],
        scaling=config.scale_of(module),
        down=forms[LORA_A].name,
        up=forms[LORA_B].name,
        magnitude=forms[MAGNITUDE].name if MAGNITUDE in forms else None,
    )


def _check_magnitude(module: str, forms: Mapping[str, _Tensor], *, use_dora: bool) -> None:
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
