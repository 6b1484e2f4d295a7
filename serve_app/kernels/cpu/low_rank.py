"""Adds what LoRA adapters change of a step's rows, in tiles of rows of one adapter.

Threads take a tile and a part of the outputs at a time. What is added up for a row is added in the order of the inputs,
and of the ranks, whatever other rows there are: a row gets the same bits in any company.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from llvmlite import ir
from torch import Tensor

from serve_app.kernels.cpu.compiling import KINDS, TOLERANCES, Kernel, Machine, tried
from serve_app.kernels.cpu.emitter import FLOAT, INT16, INT32, INT64, POINTER, Emitter, Kind, Value
from serve_app.kernels.forms import AdaptedLinear, AdapterTiles, largest_error

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
parts:  [parts, PART] int64: addresses of down [places, rank, num_inputs] and up [places, rank, outputs]; the first
        column of y; outputs
"""
PART = 4
TILE_ROWS = 8
RANKS = 4
"""Sums of a row that are in registers together. Ranks are multiples of twice as many."""
VECTORS = 4
"""Of outputs, the same."""
FULL = 4
"""Rows that are computed together where there are as many; of fewer, twice as many ranks are."""
MOST_RANK = 256

Group: TypeAlias = Callable[[int, Value], None]
"""For some rows of a tile: how many, and the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """kind: of x, y and the factors;  width: float32 of a vector"""

    kind: Kind
    width: int


def emit(numbers: Numbers) -> Any:
    """Return the module of LLVM's with the function `NAME` of the parameters' address."""
    module = ir.Module(NAME)
    _Writer(numbers, *Emitter.of_function(module, NAME, numbers.width)).write()
    return module


class _Writer:
    def __init__(self, numbers: Numbers, emitter: Emitter, given: Value) -> None:
        self._numbers = numbers
        self._build = emitter.builder
        self._emit = emitter
        self._number = FLOAT if numbers.kind == "float32" else INT16
        self._of = {name: emitter.number(given, at, INT64) for at, name in enumerate(PARAMETERS)}
        self._low = emitter.local(TILE_ROWS * MOST_RANK)
        self._first: Value = None

    def write(self) -> None:
        count = self._build.mul(self._of["num_parts"], self._of["num_tiles"])
        self._emit.take_items(self._address("counter"), count, self._change)

    def _address(self, name: str) -> Value:
        return self._build.inttoptr(self._of[name], POINTER)

    def _change(self, item: Value) -> None:
        build, emit = self._build, self._emit
        part, tile = build.sdiv(item, self._of["num_tiles"]), build.srem(item, self._of["num_tiles"])
        told = [
            emit.number(self._address("parts"), build.add(build.mul(part, INT64(PART)), INT64(at)), INT64)
            for at in range(PART)
        ]
        down, up = (build.inttoptr(address, POINTER) for address in told[:2])
        column, outputs = told[2:]
        place, self._first, count = (self._whole("tiles", self._of_tile(at, tile)) for at in range(3))
        size = build.mul(place, self._of["rank"])
        down = emit.at(down, build.mul(size, self._of["num_inputs"]), self._number)
        up = emit.at(up, build.mul(size, outputs), self._number)
        self._in_groups(count, functools.partial(self._shrink, down))
        self._in_groups(count, functools.partial(self._expand, up, column, outputs))

    def _of_tile(self, at: int, tile: Value) -> Value:
        return self._build.add(self._build.mul(INT64(at), self._of["num_tiles"]), tile)

    def _whole(self, name: str, at: Value) -> Value:
        """An int32 of an array, as int64."""
        return self._build.sext(self._emit.number(self._address(name), at, INT32), INT64)

    def _in_groups(self, count: Value, body: Group) -> None:
        """All rows of a tile, four at a time, then two, then one."""
        build = self._build
        fours = build.and_(count, INT64(-FULL))

        def four(at: Value) -> Sequence[Value]:
            body(FULL, at)
            return ()

        self._emit.repeat(INT64(0), fours, FULL, four)
        with build.if_then(build.icmp_signed("!=", build.and_(count, INT64(2)), INT64(0))):
            body(2, fours)
        with build.if_then(build.icmp_signed("!=", build.and_(count, INT64(1)), INT64(0))):
            body(1, build.and_(count, INT64(-2)))

    def _rows(self, name: str, count: int, at: Value) -> list[Value]:
        """Return where some rows of the tile begin in x or y."""
        build = self._build
        tokens = [self._whole("rows", build.add(build.add(self._first, at), INT64(row))) for row in range(count)]
        strides = [build.mul(token, self._of[f"{name}_stride"]) for token in tokens]
        return [self._emit.at(self._address(name), stride, self._number) for stride in strides]

    def _shrink(self, down: Value, count: int, at: Value) -> None:
        """low = x @ down.T · factor"""
        build, emit = self._build, self._emit
        inputs = self._rows("x", count, at)
        ranks = RANKS if count == FULL else 2 * RANKS
        factors = [
            emit.number(self._address("factors"), build.add(build.add(self._first, at), INT64(row)))
            for row in range(count)
        ]

        def some_ranks(first: Value) -> Sequence[Value]:
            weights = [
                emit.at(down, build.mul(build.add(first, INT64(each)), self._of["num_inputs"]), self._number)
                for each in range(ranks)
            ]
            places = [build.add(self._place(row, at), first) for row in range(count)]
            self._keep(self._sums(inputs, weights), factors, places)
            return ()

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
        emit, kind = self._emit, self._numbers.kind

        def multiply(begin: Value, *totals: Value) -> Sequence[Value]:
            left, right = ([emit.read(kind, each, begin) for each in some] for some in (inputs, weights))
            pairs = [(x, weight) for x in left for weight in right]
            return [emit.fused(*pair, total) for total, pair in zip(totals, pairs, strict=True)]

        nothing = [emit.all_of(0.0)] * (len(inputs) * len(weights))
        return emit.repeat(INT64(0), self._of["num_inputs"], self._numbers.width, multiply, nothing)

    def _expand(self, up: Value, column: Value, outputs: Value, count: int, at: Value) -> None:
        """y += low @ up"""
        build, width = self._build, self._numbers.width
        targets = [self._emit.at(row, column, self._number) for row in self._rows("y", count, at)]
        lows = [self._emit.at(self._low, self._place(row, at), FLOAT) for row in range(count)]
        together = VECTORS * width
        whole = build.mul(build.sdiv(outputs, INT64(together)), INT64(together))
        for begin, end, vectors in ((INT64(0), whole, VECTORS), (whole, outputs, 1)):
            body = functools.partial(self._outputs, vectors, up, outputs, targets, lows)
            self._emit.repeat(begin, end, vectors * width, body)

    def _outputs(
        self, vectors: int, up: Value, outputs: Value, targets: Sequence[Value], lows: Sequence[Value], begin: Value
    ) -> Sequence[Value]:
        """Some outputs of some rows."""
        build, emit, width, kind = self._build, self._emit, self._numbers.width, self._numbers.kind

        def multiply(rank: Value, *totals: Value) -> Sequence[Value]:
            line = build.add(build.mul(rank, outputs), begin)
            weights = [emit.read(kind, up, build.add(line, INT64(each * width))) for each in range(vectors)]
            shares = [emit.spread(emit.number(low, rank)) for low in lows]
            pairs = [(share, weight) for share in shares for weight in weights]
            return [emit.fused(*pair, total) for total, pair in zip(totals, pairs, strict=True)]

        nothing = [emit.all_of(0.0)] * (len(targets) * vectors)
        totals = iter(emit.repeat(INT64(0), self._of["rank"], 1, multiply, nothing))
        for target in targets:
            for each in range(vectors):
                at = build.add(begin, INT64(each * width))
                emit.write(kind, build.fadd(emit.read(kind, target, at), next(totals)), target, at)
        return ()


class LowRankKernels:
    """The kernels for factors of one dtype, of which `up` lies in memory as [places, rank, outputs]."""

    tile_rows = TILE_ROWS
    most_rank = MOST_RANK

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises RuntimeError where LLVM makes none."""
        machine = Machine.here()
        self._numbers = Numbers(kind=KINDS[dtype], width=machine.width)
        self._kernel = Kernel(emit(self._numbers), NAME)

    def takes(self, frame: Tensor) -> bool:
        """Return whether changes of such a weight, [outputs, inputs], are computed so."""
        return all(size % self._numbers.width == 0 for size in frame.shape)

    def adding(self, parts: Sequence[AdaptedLinear]) -> LowRankChanges:
        """Return what adds the changes of these linears."""
        return LowRankChanges(self._kernel, parts)


class LowRankChanges:
    """Adds the changes of some linears, while their factors stay where they are; it keeps them."""

    def __init__(self, kernel: Kernel, parts: Sequence[AdaptedLinear]) -> None:
        self._kernel = kernel
        self._parts = parts
        ranks = {rank for part in parts for rank in part.stacks}
        self._told = {rank: _told(rank, parts) for rank in ranks}

    def __call__(self, y: Tensor, x: Tensor, tiles: Iterable[AdapterTiles]) -> None:
        """Add to rows of y [tokens, out] what their adapters make of x [tokens, in]; no other row is touched."""
        assert y.stride(1) == 1, "a row of outputs is written where it lies"
        x = x if x.stride(1) == 1 else x.contiguous()
        inputs = x.shape[1]
        for each in tiles:
            if each.rank not in self._told:
                continue
            given, num_parts, outputs = self._told[each.rank]
            num_tiles = each.tiles.shape[1]
            self._kernel(
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
