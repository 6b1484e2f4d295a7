"""Watches that nothing of a device is looked at: meta tensors stand for a device's, as they have no numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
LOOKING = frozenset(
    {
        "_local_scalar_dense", "_unique", "_unique2", "equal", "is_nonzero", "item", "masked_select", "nonzero",
        "nonzero_numpy", "unique_consecutive", "unique_dim",
    }
)  # fmt: skip
"""Operations whose result, or its size, the host has to know."""


class Looked(AssertionError):
    """Something would have waited for the device."""


class NoLooking(TorchDispatchMode):
    """Refuses what would wait for the device: looking at its numbers, and copies that are not made in its own time.

    num_sent: copies to the device
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_sent = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})  # type: ignore[attr-defined]
        name = func.overloadpacket.__name__  # type: ignore[attr-defined]
        if any(each.device == DEVICE for each in _tensors(given)):
            if name in LOOKING or (name == "where" and len(given) == 1):
                raise Looked(f"{name} looks at the device's numbers")
            if name in {"index", "index_put", "index_put_"}:
                self._check_indices(given["indices"])
        if name == "copy_":
            self._check_copy(given["src"].device, given["self"].device, bool(given.get("non_blocking")))
        elif name in {"to", "_to_copy"} and (target := _target(given)) is not None:
            self._check_copy(given["self"].device, target, bool(given.get("non_blocking")))
        return func(*args, **(kwargs or {}))

    def _check_indices(self, indices: Any) -> None:
        for each in _tensors(indices):
            if each.dtype in (torch.bool, torch.uint8):
                raise Looked("a boolean index looks at the device's numbers")
            if each.device != DEVICE:
                raise Looked("an index of the host's memory is copied, and waited for")

    def _check_copy(self, source: torch.device, target: torch.device, non_blocking: bool) -> None:
        if source == target:
            return
        if source == DEVICE:
            raise Looked("a copy to the host beside the one at the end")
        if not non_blocking:
            raise Looked("a copy to the device that is waited for")
        self.num_sent += 1


def _target(given: dict[str, Any]) -> torch.device | None:
    other = given.get("other")
    device = given.get("device", other.device if isinstance(other, Tensor) else None)
    return None if device is None else torch.device(device)


def _tensors(nested: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(nested) if isinstance(each, Tensor))
