"""Adds what LoRA adapters change of a step's rows, in tiles of rows of one adapter.

Threads take a tile and a part of the outputs at a time. What is added up for a row is added in the order of the inputs,
and of the ranks, whatever other rows there are: a row gets the same bits in any company.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from serve_app.kernels.cpu.compiling import KINDS, TOLERANCES, Kernel, Machine, tried
from serve_app.kernels.cpu.emitter import FLOAT, INT32, INT64, POINTER, Emitter, Kind, Value
from serve_app.kernels.forms import AdaptedLinear, AdapterTiles, Adding, largest_error

SHORT = 1 << 18
"""Numbers of factors that one thread multiplies by in the time that it takes to wake another."""
NAME = "add_changes"
PARAMETERS = (
    "counter", "num_parts", "num_tiles", "x", "x_stride", "y", "y_stride", "rows", "factors", "tiles", "parts",
    "num_inputs", "rank",
)  # fmt: skip
"""Each int64. An item is a tile and a part: item // num_tiles is the part, of num_parts.

x:      [tokens, num_inputs], x_stride apart;  y: what is added to, y_stride apart
rows:   int32, tokens in the order of tiles;  factors: float32 of each
tiles:  [3, num_tiles] int32: of each the place, the first of its rows, how many, TILE_ROWS at most
parts:  [parts, len(PART)] int64: addresses of down [places, rank, num_inputs] and up [places, rank, outputs]; the first
        column of y; outputs
"""
PART = ("down", "up", "column", "outputs")
TILE_ROWS = 8
RANKS = 4
"""Sums of a row that are in registers together. Ranks are multiples of twice as many."""
VECTORS = 4
"""Of outputs, the same."""
FULL = 4
"""Rows that are computed together where there are as many; of fewer, twice as many ranks are."""
MOST_RANK = 256

Told: TypeAlias = Mapping[int, tuple[Tensor, int, int]]
"""By rank what `_told` gives."""
Group: TypeAlias = Callable[[int, Value], None]
"""For some rows of a tile: how many, and the first of them."""


class Writer:
    def __init__(self, kind: Kind, width: int) -> None:
        """kind: of x, y and the factors;  width: float32 of a vector"""
        self._emit = Emitter(NAME, PARAMETERS, width=width, kind=kind)
        self._build, self._of = self._emit.builder, self._emit.of
        self._low = self._emit.local(TILE_ROWS * MOST_RANK)
        self._first: Value = None

    def write(self) -> Any:
        """Return the module of LLVM's with the function `NAME` of the parameters' address."""
        return self._emit.take_items(self._build.mul(self._of["num_parts"], self._of["num_tiles"]), self._change)

    def _change(self, item: Value) -> None:
        build, emit = self._build, self._emit
        part, tile = build.sdiv(item, self._of["num_tiles"]), build.srem(item, self._of["num_tiles"])
        told = emit.row("parts", part, PART)
        column, outputs = told["column"], told["outputs"]
        place, self._first, count = (self._whole("tiles", self._of_tile(at, tile)) for at in range(3))
        size = build.mul(place, self._of["rank"])
        down = emit.at(build.inttoptr(told["down"], POINTER), build.mul(size, self._of["num_inputs"]))
        up = emit.at(build.inttoptr(told["up"], POINTER), build.mul(size, outputs))
        self._in_groups(count, functools.partial(self._shrink, down))
        self._in_groups(count, functools.partial(self._expand, up, column, outputs))

    def _of_tile(self, at: int, tile: Value) -> Value:
        return self._build.add(self._build.mul(INT64(at), self._of["num_tiles"]), tile)

    def _whole(self, name: str, at: Value) -> Value:
        """An int32 of an array, as int64."""
        return self._build.sext(self._emit.number(self._emit.address(name), at, INT32), INT64)

    def _in_groups(self, count: Value, body: Group) -> None:
        """All rows of a tile, four at a time, then two, then one."""
        build = self._build
        fours = build.and_(count, INT64(-FULL))

        self._emit.repeat(INT64(0), fours, FULL, functools.partial(body, FULL))
        with build.if_then(build.icmp_signed("!=", build.and_(count, INT64(2)), INT64(0))):
            body(2, fours)
        with build.if_then(build.icmp_signed("!=", build.and_(count, INT64(1)), INT64(0))):
            body(1, build.and_(count, INT64(-2)))

    def _rows(self, name: str, count: int, at: Value) -> list[Value]:
        """Return where some rows of the tile begin in x or y."""
        build = self._build
        tokens = [self._whole("rows", build.add(build.add(self._first, at), INT64(row))) for row in range(count)]
        strides = [build.mul(token, self._of[f"{name}_stride"]) for token in tokens]
        return [self._emit.at(self._emit.address(name), stride) for stride in strides]

    def _shrink(self, down: Value, count: int, at: Value) -> None:
        """low = x @ down.T · factor"""
        build, emit = self._build, self._emit
        inputs = self._rows("x", count, at)
        ranks = RANKS if count == FULL else 2 * RANKS
        factors = [
            emit.number(self._emit.address("factors"), build.add(build.add(self._first, at), INT64(row)))
            for row in range(count)
        ]

        def some_ranks(first: Value) -> None:
            weights = [
                emit.at(down, build.mul(build.add(first, INT64(each)), self._of["num_inputs"])) for each in range(ranks)
            ]
            places = [build.add(self._place(row, at), first) for row in range(count)]
            self._keep(self._sums(inputs, weights), factors, places)

        emit.repeat(INT64(0), self._of["rank"], ranks, some_ranks)

    def _keep(self, sums: Sequence[Value], factors: Sequence[Value], places: Sequence[Value]) -> None:
        """sums: of each row, whose factor and place in low are given, as many as there are ranks"""
        ranks = len(sums) // len(places)
        for row, (factor, place) in enumerate(zip(factors, places, strict=True)):
            for each in range(ranks):
                found = self._build.fmul(self._emit.folded(sums[row * ranks + each]), factor)
                self._emit.put(found, self._low, self._build.add(place, INT64(each)))

    def _place(self, row: int, at: Value) -> Value:
        """Return where a row of the tile begins in low."""
        return self._build.mul(self._build.add(at, INT64(row)), self._of["rank"])

    def _sums(self, inputs: Sequence[Value], weights: Sequence[Value]) -> list[Value]:
        """A vector for each row and rank, whose sum is their product."""
        emit = self._emit

        def multiply(begin: Value, *totals: Value) -> Sequence[Value]:
            left, right = ([emit.read(each, begin) for each in some] for some in (inputs, weights))
            pairs = [(x, weight) for x in left for weight in right]
            return [emit.fused(*pair, total) for total, pair in zip(totals, pairs, strict=True)]

        nothing = [emit.all_of(0.0)] * (len(inputs) * len(weights))
        return emit.repeat(INT64(0), self._of["num_inputs"], self._emit.width, multiply, nothing)

    def _expand(self, up: Value, column: Value, outputs: Value, count: int, at: Value) -> None:
        """y += low @ up"""
        build, width = self._build, self._emit.width
        targets = [self._emit.at(row, column) for row in self._rows("y", count, at)]
        lows = [self._emit.at(self._low, self._place(row, at), FLOAT) for row in range(count)]
        together = VECTORS * width
        whole = build.mul(build.sdiv(outputs, INT64(together)), INT64(together))
        for begin, end, vectors in ((INT64(0), whole, VECTORS), (whole, outputs, 1)):
            body = functools.partial(self._outputs, vectors, up, outputs, targets, lows)
            self._emit.repeat(begin, end, vectors * width, body)

    def _outputs(
        self, vectors: int, up: Value, outputs: Value, targets: Sequence[Value], lows: Sequence[Value], begin: Value
    ) -> None:
        """Some outputs of some rows."""
        build, emit, width = self._build, self._emit, self._emit.width

        def multiply(rank: Value, *totals: Value) -> Sequence[Value]:
            line = build.add(build.mul(rank, outputs), begin)
            weights = [emit.read(up, build.add(line, INT64(each * width))) for each in range(vectors)]
            shares = [emit.spread(emit.number(low, rank)) for low in lows]
            pairs = [(share, weight) for share in shares for weight in weights]
            return [emit.fused(*pair, total) for total, pair in zip(totals, pairs, strict=True)]

        nothing = [emit.all_of(0.0)] * (len(targets) * vectors)
        totals = iter(emit.repeat(INT64(0), self._of["rank"], 1, multiply, nothing))
        for target in targets:
            for each in range(vectors):
                at = build.add(begin, INT64(each * width))
                emit.write(build.fadd(emit.read(target, at), next(totals)), target, at)


class LowRankKernels:
    """The kernels for factors of one dtype, of which `up` lies in memory as [places, rank, outputs]."""

    tile_rows = TILE_ROWS
    most_rank = MOST_RANK

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises RuntimeError where LLVM makes none."""
        machine = Machine.here()
        self._width = machine.width
        self._kernel = Kernel(Writer(KINDS[dtype], machine.width).write(), NAME)

    def takes(self, frame: Tensor) -> bool:
        """Return whether changes of such a weight, [outputs, inputs], are computed so."""
        return all(size % self._width == 0 for size in frame.shape)

    def adding(self, parts: Sequence[AdaptedLinear]) -> Adding:
        """Return what adds the changes of these linears, while their factors stay where they are; it keeps them."""
        told = {rank: _told(rank, parts) for rank in {rank for part in parts for rank in part.stacks}}
        return functools.partial(_add, self._kernel, told, parts)


def _add(kernel: Kernel, told: Told, _kept: object, y: Tensor, x: Tensor, tiles: Iterable[AdapterTiles]) -> None:
    assert y.stride(1) == 1, "a row of outputs is written where it lies"
    x = x if x.stride(1) == 1 else x.contiguous()
    inputs = x.shape[1]
    for each in tiles:
        if each.rank not in told:
            continue
        given, num_parts, outputs = told[each.rank]
        num_tiles = each.tiles.shape[1]
        kernel(
            num_parts, num_tiles, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0),
            each.rows.data_ptr(), each.factors.data_ptr(), each.tiles.data_ptr(), given.data_ptr(),
            inputs, each.rank, is_short=num_tiles * each.rank * (num_parts * inputs + outputs) <= SHORT,
        )  # fmt: skip


def _told(rank: int, parts: Sequence[AdaptedLinear]) -> tuple[Tensor, int, int]:
    """Return what the kernel is told of the parts that adapters of a rank change, how many, and outputs of all."""
    found = [(part.stacks[rank], part.begin, part.end - part.begin) for part in parts if rank in part.stacks]
    told = [[stack.down.data_ptr(), stack.up.data_ptr(), begin, outputs] for stack, begin, outputs in found]
    return torch.tensor(told), len(found), sum(outputs for _, _, outputs in found)


@functools.cache
def low_rank_kernels(dtype: torch.dtype) -> LowRankKernels | None:
    """Return the kernels for factors of that type; None where this machine has none."""
    if dtype not in KINDS:
        return None
    make = functools.partial(LowRankKernels, dtype)

    def is_right(made: LowRankKernels) -> bool:
        return largest_error(made, dtype, torch.device("cpu")) <= TOLERANCES[dtype]

    return tried(f"changes of adapters in {dtype}", make, is_right)
