"""Says which adapters leave the keys and values of every token as the base has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from serve_app.engine.decoder.text_part import text_config
from serve_app.engine.lora.matching import head_name

BEHIND_KEYS = frozenset(
    {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_up_proj"}
)
"""Of a layer, what makes neither keys nor values, nor what they are made from."""


def keeps_prefix(modules: Iterable[str], model: nn.Module) -> bool:
    """Whether changes to these modules change no key and no value of any token.

    Keys and values of a layer follow from all layers before it, so only the head may be changed, and of the last layer
    what makes queries or comes behind attention. Few adapters are like that; where it is not known, it is False.
    """
    config: Any = text_config(model.config)
    last = f"layers.{int(getattr(config, 'num_hidden_layers', 0)) - 1}."
    head = head_name(model)
    return all(name == head or _place(name, last) in BEHIND_KEYS for name in modules)


def _place(name: str, last: str) -> str:
    """A module's name within the last layer; "" outside of it."""
    before, sign, within = name.rpartition(f".{last}")
    return within if sign and "layers." not in before else ""
