"""Finds the largest of each row of bfloat16 in one pass, by its bits: nothing is widened or written.

Threads take one row after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from serve_app.engine.cpu.emitter import INT16, INT64, POINTER, Emitter, Value

LIKELIEST = "likeliest"
PARAMETERS = ("counter", "num_items", "logits", "stride", "num_columns", "found")
"""Each int64: addresses, and how many. Rows of bfloat16 are `stride` apart; found: [items] int64."""
VECTORS = 16
"""Of a block, whose largest number is looked for before any is asked where it is."""
MAGNITUDE, INFINITY, LAST = 0x7FFF, 0x7F80, 0x7FFF


def emit(width: int) -> Any:
    """The module of LLVM's with the function, of its parameters' address; width: float32 of a vector"""
    module = ir.Module("likeliest")
    _Function(module, 2 * width).write()
    return module


class _Function:
    """Bits are made numbers that are in order as what they stand for: what is no number last, both zeros one."""

    def __init__(self, module: Any, lanes: int) -> None:
        self.emit, given = Emitter.of_function(module, LIKELIEST, lanes // 2)
        self.build = self.emit.builder
        self.lanes = lanes
        self.vector = ir.VectorType(INT16, lanes)
        self.of = {each: self.emit.number(given, at, INT64) for at, each in enumerate(PARAMETERS)}

    def write(self) -> None:
        counter = self.build.inttoptr(self.of["counter"], POINTER)
        self.emit.take_items(counter, self.of["num_items"], self._look)

    def _look(self, item: Value) -> None:
        build, count = self.build, self.of["num_columns"]
        start = build.mul(item, self.of["stride"])
        row = self.emit.at(build.inttoptr(self.of["logits"], POINTER), start, INT16)
        size = INT64(VECTORS * self.lanes)
        whole = build.mul(build.sdiv(count, size), size)
        lowest, nowhere = INT16(-(1 << 15)), INT64(0)
        best = self.emit.repeat(
            INT64(0), whole, VECTORS * self.lanes, functools.partial(self._block, row), [lowest, nowhere]
        )
        highest, block = self.emit.repeat(whole, count, 1, functools.partial(self._column, row, whole), best)
        stop = self.emit.least(build.add(block, size), count)
        (place,) = self.emit.repeat(block, stop, 1, functools.partial(self._find, row, highest), [INT64(-1)])
        build.store(place, self.emit.at(build.inttoptr(self.of["found"], POINTER), item, INT64))

    def _block(self, row: Value, first: Value, highest: Value, block: Value) -> Sequence[Value]:
        """The largest so far, and where the block begins that had it first."""
        build = self.build
        places = [build.add(first, INT64(at * self.lanes)) for at in range(VECTORS)]
        read = [build.load(self.emit.at(row, place, INT16), typ=self.vector, align=2) for place in places]
        orders = [self._in_order(each) for each in read]
        largest = functools.reduce(self._larger, orders)
        own = self.emit.call(f"llvm.vector.reduce.smax.v{self.lanes}i16", INT16, largest)
        return self._best(own, first, highest, block)

    def _column(self, row: Value, start: Value, column: Value, highest: Value, block: Value) -> Sequence[Value]:
        """The same of a column behind all whole blocks."""
        return self._best(self._in_order(self.emit.number(row, column, INT16)), start, highest, block)

    def _find(self, row: Value, highest: Value, column: Value, place: Value) -> Sequence[Value]:
        """The first column of this one's block that is as large."""
        build = self.build
        is_it = build.icmp_signed("==", self._in_order(self.emit.number(row, column, INT16)), highest)
        is_first = build.and_(is_it, build.icmp_signed("<", place, INT64(0)))
        return (build.select(is_first, column, place),)

    def _best(self, own: Value, start: Value, highest: Value, block: Value) -> Sequence[Value]:
        is_better = self.build.icmp_signed(">", own, highest)
        return self.build.select(is_better, own, highest), self.build.select(is_better, start, block)

    def _in_order(self, bits: Value) -> Value:
        build, kind = self.build, bits.type

        def all_of(number: int) -> Value:
            return INT16(number) if kind == INT16 else ir.Constant(kind, [number] * self.lanes)

        magnitude = build.and_(bits, all_of(MAGNITUDE))
        flipped = build.xor(bits, build.and_(build.ashr(bits, all_of(15)), all_of(MAGNITUDE)))
        is_zero = build.icmp_signed("==", magnitude, all_of(0))
        is_no_number = build.icmp_signed(">", magnitude, all_of(INFINITY))
        return build.select(is_no_number, all_of(LAST), build.select(is_zero, all_of(0), flipped))

    def _larger(self, x: Value, y: Value) -> Value:
        return self.emit.call(f"llvm.smax.v{self.lanes}i16", self.vector, x, y)
