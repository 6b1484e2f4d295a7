"""Reads adapter_config.json: what PEFT's LoRA configuration says and whether the engine computes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from serve_app.catalog.errors import CatalogError
from serve_app.core.adapters import MAX_PATTERN_KEYS, AdapterConfig, compile_pattern

MAX_RANK = 256
MAX_PATTERN_CHARS = 256

# Fields that say how the adapter was made or where, or that its tensors show as well.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
        "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip
_READ = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern",
        "fan_in_fan_out", "bias", "init_lora_weights",
    }
)  # fmt: skip
# Initialisations that leave the base model's weights as they are; others (PiSSA, OLoRA, CorDA, LoftQ, …) are
# only right together with a changed base.
_KEEPS_BASE = frozenset({"gaussian", "eva", "orthogonal"})
# What can make matching take long (repeated groups, references back) or means no name (flags, odd sets).
_WILD = re.compile(r"\)[*+?]|\{|\(\?|\\[0-9]|\[\[|--|&&|~~|\|\|")
_MAX_REPEATS = 3
_MAX_ALPHA = 1e6


def parse_adapter_config(fields: Mapping[str, Any]) -> AdapterConfig:
    """Check the fields of an adapter_config.json.

    Raises CatalogError, which names the field, for what the engine does not compute.
    """
    if fields.get("peft_type") != "LORA":
        raise _refused("peft_type", fields.get("peft_type"), allowed='"LORA"')
    for name, value in sorted(fields.items()):
        if name not in _READ and name not in _WITHOUT_EFFECT and value:
            raise CatalogError(f"adapter_config.json: {name} is set, which is not supported")
    if fields.get("bias", "none") != "none":
        raise _refused("bias", fields["bias"], allowed='"none"')
    init = fields.get("init_lora_weights", True)
    if not isinstance(init, bool) and str(init) not in _KEEPS_BASE:
        raise CatalogError(
            f"adapter_config.json: init_lora_weights is {init!r}, which changes the base model; convert the "
            "adapter to plain LoRA (path_initial_model_for_weight_conversion in PEFT)"
        )
    _check_rank("r", fields.get("r"))
    _check_alpha("lora_alpha", fields.get("lora_alpha"))
    _flag(fields, "fan_in_fan_out")  # how the base keeps its weights: the model itself shows it
    rank_pattern = _pattern(fields, "rank_pattern")
    for key, value in rank_pattern.items():
        _check_rank(f"rank_pattern[{key!r}]", value)
    alpha_pattern = _pattern(fields, "alpha_pattern")
    for key, value in alpha_pattern.items():
        _check_alpha(f"alpha_pattern[{key!r}]", value)
    return AdapterConfig(
        rank=fields["r"],
        alpha=float(fields["lora_alpha"]),
        use_rslora=_flag(fields, "use_rslora"),
        use_dora=_flag(fields, "use_dora"),
        rank_pattern=rank_pattern,
        alpha_pattern={key: float(value) for key, value in alpha_pattern.items()},
    )


def _pattern(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    pattern = fields.get(name) or {}
    if not isinstance(pattern, dict):
        raise _refused(name, pattern, allowed="an object of module names")
    if len(pattern) > MAX_PATTERN_KEYS:
        raise _refused(name, len(pattern), allowed=f"of at most {MAX_PATTERN_KEYS} keys")
    for key in pattern:
        _check_expression(name, key)
    return pattern


def _check_expression(name: str, key: str) -> None:
    """Refuse expressions that could take long to match; plain module names are expressions, too."""
    repeats = sum(key.count(sign) for sign in "*+?")
    if len(key) > MAX_PATTERN_CHARS or repeats > _MAX_REPEATS or _WILD.search(key):
        raise CatalogError(
            f"adapter_config.json: {name} has the key {key[:80]!r}; allowed are up to "
            f"{MAX_PATTERN_CHARS} characters, {_MAX_REPEATS} of the signs * + ? and none of them behind a group"
        )
    try:
        compile_pattern(key)
    except (re.error, OverflowError, RecursionError) as error:
        raise CatalogError(f"adapter_config.json: {name} has the key {key!r}, no expression: {error}") from None


def _check_rank(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _refused(name, value, allowed=f"a whole number from 1 to {MAX_RANK}")


def _check_alpha(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not abs(value) < _MAX_ALPHA:
        raise _refused(name, value, allowed=f"a number of less than {_MAX_ALPHA:g}")


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name) or False
    if value is not True and value is not False:
        raise _refused(name, value, allowed="true or false")
    return value


def _refused(name: str, found: Any, *, allowed: str) -> CatalogError:
    return CatalogError(f"adapter_config.json: {name} must be {allowed}, found {str(found)[:80]!r}")
