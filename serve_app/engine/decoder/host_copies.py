"""Copies between host and device for which neither waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Land: TypeAlias = Callable[[Tensor], "Landing"]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The host's tensor on the device. A copy is made in the order of the device's work, from memory that stays."""
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # whose block is not given to another before the copy was made
    return tensor.to(device, non_blocking=True)


def send_into(target: Tensor, tensor: Tensor) -> None:
    """Have the host's tensor overwrite one of the device, in the order of the device's work."""
    if target.device.type == "cuda":
        tensor = tensor.pin_memory()
    target.copy_(tensor, non_blocking=True)


class Landing:
    """A device's tensor on its way to the host, behind what is to be computed for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """It, when it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def landing_on(device: torch.device) -> Land | None:
    """How what was computed there comes to the host; None where it is there."""
    return None if device.type == "cpu" else Landing
