"""Finds where a model with mixtures of experts hands tokens to experts, whichever family it is of."""

from __future__ import annotations

import inspect
import re

from torch import nn

CHOSEN = frozenset({"top_k_index", "router_indices"})
"""What transformers' families call the second argument of their experts: [tokens, experts per token] int64."""
NUMBER = re.compile(r"\.(\d+)\.")


def expert_layers(module: nn.Module) -> dict[int, nn.Module]:
    """The experts of each layer that has them, by the layer's number; called as (tokens, which experts, their weights).

    Empty for a dense model, and for a family whose experts are called in another way.
    """
    found = {}
    for name, part in module.named_modules():
        number = NUMBER.search(f"{name}.")
        is_wrapped = name.endswith(".base")  # what adapters change is called through what is around it
        if number is not None and not is_wrapped and _is_called_so(part):
            found[int(number[1])] = part
    return found


def _is_called_so(part: nn.Module) -> bool:
    parameters = list(inspect.signature(part.forward).parameters)
    return len(parameters) > 2 and parameters[1] in CHOSEN
