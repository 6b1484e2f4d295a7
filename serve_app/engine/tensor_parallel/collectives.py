"""Sums over all shards, through torch.distributed."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""All shards are on one machine; no other machine may connect to them."""


class Collectives:
    """One shard's end of the process group; a process has one. All shards ask for the same sums in the same order.

    A sum waits for a late shard up to the time limit.
    """

    def __init__(self, meeting_place: str, *, number: int, count: int, device: torch.device, timeout_s: float) -> None:
        """meeting_place: a path where no file is yet, the same for all shards"""
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)
        self.device = device
        is_cuda = device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl" if is_cuda else "gloo",
            init_method=f"file://{meeting_place}",
            rank=number,
            world_size=count,
            timeout=timedelta(seconds=timeout_s),
        )

    def total(self, part: Tensor) -> Tensor:
        """Replace this shard's part by the sum of all shards' parts, and return it."""
        distributed.all_reduce(part)
        return part

    def least(self, number: int) -> int:
        """Return the least of all shards' numbers."""
        found = torch.tensor(number, dtype=torch.int64, device=self.device)
        distributed.all_reduce(found, distributed.ReduceOp.MIN)
        return int(found)

    def everywhere(self, flags: Tensor) -> Tensor:
        """Return which flags are set in all shards."""
        found = flags.to(torch.int64)
        distributed.all_reduce(found, distributed.ReduceOp.MIN)
        return found.bool()

    def close(self) -> None:
        distributed.destroy_process_group()


def sum_outputs(decoder: Any, sums: Collectives) -> None:
    """Have transformers' modules sum what their attention and their MLP give, adapters' changes included."""
    for layer in decoder.layers:
        layer.self_attn.register_forward_hook(lambda _, __, output: (sums.total(output[0]), *output[1:]))
        layer.mlp.register_forward_hook(lambda _, __, output: sums.total(output))
