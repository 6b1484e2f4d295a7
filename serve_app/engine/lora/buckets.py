"""Rank buckets: the stacked factors of adapters of one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.engine.lora.adapter import LowRank
from serve_app.kernels.forms import Factors

MIN_RANK = 8


def shelf_rank(rank: int) -> int:
    """The rank of the shelf for an adapter of that rank: 8, 16, 32, …, less than twice the rank from 8 on."""
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack(Factors):
    """What a shelf's places do to one weight.

    down: [places, rank, in];  up: [places, out, rank], which on CPUs lies in memory as [places, rank, out]; of experts
    each has one more dimension behind the places
    """

    @property
    def num_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def resized(self, num_places: int) -> Stack:
        """A copy with more places or fewer."""
        kept = min(num_places, self.down.shape[0])
        frame = self.down.new_empty(1).expand(*self.up.shape[1:-1], self.down.shape[-1])
        larger = new_stack(num_places, self.down.shape[-2], frame)
        larger.down[:kept] = self.down[:kept]
        larger.up[:kept] = self.up[:kept]
        return larger

    def put(self, place: int, low_rank: LowRank | None) -> None:
        """Fill a place; None leaves the module as it is."""
        rank = 0 if low_rank is None else low_rank.up.shape[-1]
        down, up = self.down[place], self.up[place]
        down[..., rank:, :].zero_()
        up[..., rank:].zero_()
        if low_rank is not None:
            down[..., :rank, :].copy_(low_rank.down)
            up[..., :rank].copy_(low_rank.up)


def entries_per_rank(frame: Tensor) -> int:
    """Return the numbers that one rank of a change takes to a weight of that frame."""
    *experts, outputs, inputs = frame.shape
    return math.prod(experts) * (outputs + inputs)


def new_stack(num_places: int, rank: int, frame: Tensor) -> Stack:
    """Places that change nothing, for a weight [out, in] of such a size and type, or one of [experts, out, in]."""
    *experts, outputs, inputs = frame.shape

    def zeros(*size: int) -> Tensor:
        return torch.zeros(num_places, *experts, *size, dtype=frame.dtype, device=frame.device)

    up = zeros(rank, outputs).mT if frame.device.type == "cpu" else zeros(outputs, rank)
    return Stack(down=zeros(rank, inputs), up=up)


class Shelf:
    """Grows with the adapters on it, twice as many places at a time, and gives the memory back when they leave.

    One thread at a time changes it. Another may compute meanwhile with places that are filled: a stack is replaced
    by a larger copy, and the places that are written are nobody's.

    num_changes: another number where the stacks are other tensors, and while they are about to be
    """

    def __init__(self, rank: int, weights: Mapping[str, Tensor], *, most: int) -> None:
        """weights: [out, in] of every module that may be changed, or [experts, out, in]; sizes, dtype, device count

        most: places that are ever taken at once
        """
        self.rank = rank
        self.stacks: dict[str, Stack] = {}
        self.num_changes = 0
        self._weights, self._most = weights, most
        self._capacity = self._least = 0
        self._taken: set[int] = set()

    @property
    def num_bytes(self) -> int:
        return sum(stack.num_bytes for stack in tuple(self.stacks.values()))

    def put(self, weights: Mapping[str, LowRank], room: int | None = None) -> int:
        """Take the lowest free place, fill it, and return it.

        room: bytes that all places may take before further ones are made at once for later; None does not bound them
        """
        place = next(place for place in range(self._capacity + 1) if place not in self._taken)
        if place == self._capacity:
            per_place = self._bytes_per_place({*self.stacks, *weights})
            doubled = max(1, min(2 * self._capacity, self._most))
            self._resize(doubled if room is None or doubled * per_place <= room else place + 1)
        for name in weights.keys() - self.stacks.keys():
            self.stacks[name] = new_stack(self._capacity, self.rank, self._weights[name])
            self.num_changes += 1
        for name, stack in self.stacks.items():
            stack.put(place, weights.get(name))
        self._taken.add(place)
        return place

    def reserve(self, names: Iterable[str], room: int | None) -> None:
        """Take places for these weights and keep them, as many as may ever be taken or fit into so many bytes."""
        names = {*self.stacks, *names}
        fitting = self._most if room is None else room // max(1, self._bytes_per_place(names))
        self._least = max(1, min(self._most, fitting))
        self._resize(max(self._capacity, self._least))
        self.stacks |= {
            name: new_stack(self._capacity, self.rank, self._weights[name]) for name in names - self.stacks.keys()
        }

    def _bytes_per_place(self, names: Iterable[str]) -> int:
        frames = [self._weights[name] for name in names]
        return self.rank * sum(entries_per_rank(frame) * frame.itemsize for frame in frames)

    def free(self, place: int) -> None:
        """Give a place back; its memory stays until `trim`."""
        self._taken.remove(place)

    def trim(self) -> None:
        """Give back what is far more than needed."""
        needed = max(max(self._taken, default=-1) + 1, self._least)
        if not needed and self._capacity:
            self.num_changes += 1
            self.stacks = {}
            self._capacity = 0
            self.num_changes += 1
        elif needed <= self._capacity // 4:
            self._resize(self._capacity // 2)

    def _resize(self, capacity: int) -> None:
        self.num_changes += 1
        for name in list(self.stacks):
            self.stacks[name] = self.stacks[name].resized(capacity)
        self._capacity = capacity
        self.num_changes += 1
