"""All private parts of transformers that the service uses, seen in transformers 5.23."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


def from_config(kind: type[PreTrainedModel], config: PreTrainedConfig, *, dtype: torch.dtype | None) -> nn.Module:
    """Make a model of this class. The public `from_config` of the Auto classes chooses the class by itself."""
    made: nn.Module = kind._from_config(deepcopy(config), dtype=dtype, attn_implementation="eager")
    return made


def unregister(functions: Any, name: str) -> None:
    """Undo `register` of transformers' attention functions. `del` undoes only what one module set for itself."""
    functions._global_mapping.pop(name, None)


def lets_attention_be_chosen(model: PreTrainedModel) -> bool:
    """Return whether the model's attention can be exchanged. The public setter only logs a warning if it cannot."""
    return bool(model._can_set_attn_implementation())


def leave_unread(model: Any, modules: Iterable[str]) -> None:
    """Keep `from_pretrained` from reporting weights of these modules. It has no argument for them."""
    known = set(model._keys_to_ignore_on_load_unexpected or ())
    model._keys_to_ignore_on_load_unexpected = known | {rf"(^|\.){name}\." for name in modules}


def mark_as_loaded(parameter: Tensor) -> None:
    """Keep `from_pretrained` from filling a parameter anew. Its public hooks know names of modules only."""
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def apply_gate(experts: Any, x: Tensor) -> Tensor:
    """Return gate and up projections of experts as their model combines them: each family may have a way of its own.

    x: [rows, 2 * inner]. Returns [rows, inner].
    """
    gated: Tensor = experts._apply_gate(x)
    return gated
