"""Products of few rows with a weight that oneDNN has laid out in bfloat16: one pass over its memory for all rows.

A block of 64 outputs is multiplied by all rows before the next one is read, which is fetched meanwhile; so a step of
some sequences takes as long as reading the weights, or as multiplying by them, and not both. What is added up for a
row is added in the order of the inputs, whatever other rows there are: a row gets the same bits in any company.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from serve_app.engine.cpu.emitter import FLOAT, INT16, INT32, INT64, POINTER, Emitter, Value

NAME = "multiply_rows"
PARAMETERS = (
    "counter", "num_blocks", "x", "x_stride", "weight", "output", "num_outputs", "bias", "num_rows", "num_pairs",
    "num_threads", "lines",
)  # fmt: skip
"""Each int64. weight: [num_blocks, num_pairs, BLOCK, 2];  bias: float32, 0 for none;  x_stride: numbers
lines: that are fetched ahead with each pair of inputs, 1, 2 or 4
"""
BLOCK = 64
"""Outputs."""
WIDTH = 16
"""float32 of a vector, and pairs of bfloat16 that are multiplied and added to it."""
VECTORS = BLOCK // WIDTH
TILE = 6
"""Rows whose sums are in registers together: 24 of the 32 vectors."""
MAX_ROWS = 64
CHUNK = 256
"""Pairs of inputs after which the next rows are multiplied by the same part of a block: 64 KiB of it."""
UNROLLED = 2
"""Pairs; a divisor of what is multiplied."""
LINE = 32
"""bfloat16 of a cache line."""
FETCHES = (4, 2, 1)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


PAIRS = ir.VectorType(_BFloat(), 2 * WIDTH)


def emit() -> Any:
    """The module of LLVM's with the function `NAME` of the parameters' address. For CPUs with AVX512-BF16."""
    module = ir.Module(NAME)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), NAME)
    function.attributes.add("nounwind")
    _Writer(function).write()
    return module


class _Writer:
    def __init__(self, function: Any) -> None:
        self._build = ir.IRBuilder(function.append_basic_block("entry"))
        self._emit = Emitter(self._build, WIDTH)
        self._of = {name: self._emit.number(function.args[0], at, INT64) for at, name in enumerate(PARAMETERS)}
        self._sums = self._emit.local(MAX_ROWS * BLOCK)
        self._block: Value = None
        self._weights: Value = None
        self._next: Value = None

    def write(self) -> None:
        build = self._build
        again, go, done = (build.append_basic_block(name) for name in ("again", "go", "done"))
        build.branch(again)
        build.position_at_end(again)
        self._block = build.atomic_rmw("add", self._address("counter"), INT64(1), "monotonic")
        build.cbranch(build.icmp_signed("<", self._block, self._of["num_blocks"]), go, done)
        build.position_at_end(done)
        build.ret_void()
        build.position_at_end(go)
        self._multiply_block()
        build.branch(again)

    def _address(self, name: str) -> Value:
        return self._build.inttoptr(self._of[name], POINTER)

    def _multiply_block(self) -> None:
        emit = self._emit
        emit.repeat(INT64(0), self._of["num_pairs"], CHUNK, self._multiply_chunk)
        emit.repeat(INT64(0), self._of["num_rows"], 1, self._give)

    def _multiply_chunk(self, begin: Value) -> Sequence[Value]:
        """All rows' sums over some pairs of inputs, from a first one on."""
        build, emit = self._build, self._emit
        left = build.sub(self._of["num_pairs"], begin)
        pairs = self._least(left, INT64(CHUNK))
        size = build.mul(self._of["num_pairs"], INT64(2 * BLOCK))
        start = build.add(build.mul(self._block, size), build.mul(begin, INT64(2 * BLOCK)))
        self._weights = emit.at(self._address("weight"), start, INT16)
        behind = emit.at(self._weights, build.mul(pairs, INT64(2 * BLOCK)), INT16)
        ahead = build.mul(build.add(self._block, self._of["num_threads"]), size)
        other = emit.at(self._address("weight"), ahead, INT16)
        is_last = build.icmp_signed("<=", left, INT64(CHUNK))
        self._next = build.select(is_last, other, behind)
        whole = build.mul(build.sdiv(self._of["num_rows"], INT64(TILE)), INT64(TILE))
        for lines in FETCHES:
            with build.if_then(build.icmp_signed("==", self._of["lines"], INT64(lines))):
                emit.repeat(INT64(0), whole, TILE, functools.partial(self._tile, TILE, lines, begin, pairs))
                rest = build.sub(self._of["num_rows"], whole)
                for rows in range(1, TILE):
                    with build.if_then(build.icmp_signed("==", rest, INT64(rows))):
                        self._tile(rows, lines, begin, pairs, whole)
        return ()

    def _least(self, x: Value, y: Value) -> Value:
        return self._build.select(self._build.icmp_signed("<", x, y), x, y)

    def _tile(self, rows: int, lines: int, begin: Value, pairs: Value, first: Value) -> Sequence[Value]:
        """Some rows' sums over the chunk's pairs, in registers."""
        build, emit = self._build, self._emit
        start = build.add(build.mul(first, self._of["x_stride"]), build.mul(begin, INT64(2)))
        inputs = [
            emit.at(self._address("x"), build.add(start, build.mul(self._of["x_stride"], INT64(row))), INT16)
            for row in range(rows)
        ]
        sums = emit.at(self._sums, build.mul(first, INT64(BLOCK)), FLOAT)
        places = [row * BLOCK + at * WIDTH for row in range(rows) for at in range(VECTORS)]
        # lines are fetched in the passes that it takes to fetch all of them, and none in those behind
        number = build.mul(build.sdiv(first, INT64(TILE)), INT64(lines))
        is_needed = build.icmp_signed("<", number, INT64(VECTORS))
        step = build.select(is_needed, INT64(lines * LINE), INT64(0))
        fetched = build.select(
            is_needed, emit.at(self._next, build.mul(number, build.mul(pairs, INT64(LINE))), INT16), self._weights
        )

        def multiply(at: Value, *totals: Value) -> Sequence[Value]:
            for more in range(UNROLLED):
                pair = build.add(at, INT64(more))
                place = emit.at(fetched, build.mul(pair, step), INT16)
                for line in range(lines):
                    self._fetch(emit.at(place, line * LINE, INT16))
                totals = tuple(self._pair(pair, inputs, totals))
            return totals

        is_first = build.icmp_signed("==", begin, INT64(0))
        before = [build.select(is_first, emit.all_of(0.0), emit.floats(sums, place)) for place in places]
        found = emit.repeat(INT64(0), pairs, UNROLLED, multiply, before)
        for place, total in zip(places, found, strict=True):
            emit.put(total, sums, place)
        return ()

    def _pair(self, pair: Value, inputs: Sequence[Value], totals: Sequence[Value]) -> list[Value]:
        build, emit = self._build, self._emit
        weights = emit.at(self._weights, build.mul(pair, INT64(2 * BLOCK)), INT16)
        vectors = [build.load(emit.at(weights, at * 2 * WIDTH, INT16), typ=PAIRS, align=2) for at in range(VECTORS)]
        words = ir.VectorType(INT32, WIDTH)
        nothing = ir.Constant(words, ir.Undefined)
        found = []
        for row, base in enumerate(inputs):
            both = build.load(emit.at(base, pair, INT32), typ=INT32, align=2)
            spread = build.shuffle_vector(build.insert_element(nothing, both, INT32(0)), nothing, emit.whole(0))
            x = build.bitcast(spread, PAIRS)
            own = totals[row * VECTORS : (row + 1) * VECTORS]
            found += [self._dot(total, x, vector) for total, vector in zip(own, vectors, strict=True)]
        return found

    def _dot(self, total: Value, x: Value, weights: Value) -> Value:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        module = self._build.module
        kind = ir.FunctionType(self._emit.vector, [self._emit.vector, PAIRS, PAIRS])
        return self._build.call(module.globals.get(name) or ir.Function(module, kind, name), [total, x, weights])

    def _fetch(self, place: Value) -> None:
        """Bring a line near, into the second cache."""
        name, module = "llvm.prefetch.p0", self._build.module
        kind = ir.FunctionType(ir.VoidType(), [POINTER, INT32, INT32, INT32])
        function = module.globals.get(name) or ir.Function(module, kind, name)
        self._build.call(function, [place, INT32(0), INT32(2), INT32(1)])

    def _give(self, row: Value) -> Sequence[Value]:
        """Write a row's outputs of the block, those that there are."""
        build, emit = self._build, self._emit
        first = build.mul(self._block, INT64(BLOCK))
        sums = emit.at(self._sums, build.mul(row, INT64(BLOCK)), FLOAT)
        start = build.add(build.mul(row, self._of["num_outputs"]), first)
        output = emit.at(self._address("output"), start, INT16)
        bias = emit.at(self._address("bias"), first, FLOAT)
        has_bias = build.icmp_signed("!=", self._of["bias"], INT64(0))
        for at in range(0, BLOCK, WIDTH):
            exists = build.icmp_signed("<", build.add(first, INT64(at)), self._of["num_outputs"])
            with build.if_then(build.and_(exists, has_bias)):
                emit.put(build.fadd(emit.floats(sums, at), emit.floats(bias, at)), sums, at)
            with build.if_then(exists):
                emit.write("bfloat16", emit.floats(sums, at), output, at)
        return ()
