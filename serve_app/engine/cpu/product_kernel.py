"""Products of rows with a weight in blocks of 64 outputs, in bfloat16 or in whole numbers of eight bits.

A block is multiplied by all rows before the next one is read, which is fetched meanwhile; so a step of some sequences
takes as long as reading the weights, or as multiplying by them, and not both. What is added up for a row is added in
the order of the inputs, whatever other rows there are: a row gets the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from serve_app.engine.cpu.emitter import FLOAT, INT16, INT32, INT64, POINTER, Emitter, Kind, Value
from serve_app.engine.cpu.pairs import Pairs, multiplied_by_word

NAME = "multiply_rows"
PARAMETERS = (
    "counter", "num_blocks", "x", "x_stride", "weight", "output", "num_outputs", "bias", "num_rows", "num_groups",
    "num_threads", "scales", "factors", "offsets", "num_whole", "num_parts",
)  # fmt: skip
"""Each int64. A word is what 32 bits hold of a row's inputs, two or four: a group.

x:       [num_rows, words], x_stride words apart;  weight: [num_blocks, num_groups, BLOCK] words
bias:    float32, 0 for none
scales:  float32 of each row;  factors: float32, and offsets: int32, of each output; of whole numbers alone, of which
         the result is (sum - offset) · scale · factor + bias
num_whole: blocks that one thread multiplies by all rows; behind them each is `num_parts` items, of ROWS rows
"""
BLOCK = 64
"""Outputs."""
WIDTH = 16
"""Sums of a vector."""
VECTORS = BLOCK // WIDTH
FEW = 6
"""Rows up to which a whole block's sums are in registers together: 24 of the 32 vectors."""
PART = 32
"""Outputs of a block that are multiplied by more rows together."""
MOST = 12
"""Rows of those: 24 vectors again."""
ROWS = 60
"""Rows that are multiplied by a block before the next rows are: so many sums are there at a time."""
CHUNK = 512
"""Groups of inputs after which the next rows are multiplied by the same part of a block: 128 KiB of it."""
UNROLLED = 2
"""Groups; a divisor of what is multiplied."""
LINE = 16
"""Words of a cache line."""

WORDS = ir.VectorType(INT32, WIDTH)
QUADS = ir.VectorType(ir.IntType(8), 4 * WIDTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What is multiplied. is_whole: inputs of 0 … 255 and weights of -128 … 127, else both bfloat16

    output: the kind of the results
    """

    is_whole: bool
    output: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Sums that are in registers. vectors: of each row;  lines: that are fetched ahead with each group"""

    rows: int
    vectors: int
    lines: int


def emit(**fields: Any) -> Any:
    """The module of LLVM's with the function `NAME` of the parameters' address; fields: of the `Numbers`

    For CPUs with AVX512-BF16, or AVX512-VNNI.
    """
    module = ir.Module(NAME)
    _Writer(Numbers(**fields), *Emitter.of_function(module, NAME, WIDTH)).write()
    return module


class _Writer:
    """first: of the rows that a block is multiplied by;  begin: of the groups of a chunk"""

    def __init__(self, numbers: Numbers, emitter: Emitter, given: Value) -> None:
        self._numbers = numbers
        self._build = emitter.builder
        self._emit = emitter
        self._pairs = Pairs(emitter)
        self._of = {name: emitter.number(given, at, INT64) for at, name in enumerate(PARAMETERS)}
        self._sums = self._emit.local(ROWS * BLOCK)
        self._block: Value = None
        self._first: Value = None
        self._rows: Value = None
        self._begin: Value = None
        self._groups: Value = None
        self._weights: Value = None
        self._next: Value = None

    def write(self) -> None:
        whole, parts = self._of["num_whole"], self._of["num_parts"]
        divided = self._build.mul(self._build.sub(self._of["num_blocks"], whole), parts)
        self._emit.take_items(self._address("counter"), self._build.add(whole, divided), self._multiply)

    def _multiply(self, item: Value) -> None:
        build, whole, parts = self._build, self._of["num_whole"], self._of["num_parts"]
        behind = build.sub(item, whole)
        is_whole = build.icmp_signed("<", behind, INT64(0))
        self._block = build.select(is_whole, item, build.add(whole, build.sdiv(behind, parts)))
        begin = build.select(is_whole, INT64(0), build.mul(build.srem(behind, parts), INT64(ROWS)))
        end = build.select(is_whole, self._of["num_rows"], build.add(begin, INT64(ROWS)))
        self._emit.repeat(begin, self._emit.least(end, self._of["num_rows"]), ROWS, self._multiply_block)

    def _address(self, name: str) -> Value:
        return self._build.inttoptr(self._of[name], POINTER)

    def _multiply_block(self, first: Value) -> Sequence[Value]:
        self._first = first
        self._rows = self._emit.least(self._build.sub(self._of["num_rows"], first), INT64(ROWS))
        self._emit.repeat(INT64(0), self._of["num_groups"], CHUNK, self._multiply_chunk)
        self._emit.repeat(INT64(0), self._rows, 1, self._give)
        return ()

    def _multiply_chunk(self, begin: Value) -> Sequence[Value]:
        """The rows' sums over some groups of inputs, from a first one on."""
        build, emit = self._build, self._emit
        left = build.sub(self._of["num_groups"], begin)
        groups = self._emit.least(left, INT64(CHUNK))
        size = build.mul(self._of["num_groups"], INT64(BLOCK))
        start = build.add(build.mul(self._block, size), build.mul(begin, INT64(BLOCK)))
        self._weights = emit.at(self._address("weight"), start, INT32)
        behind = emit.at(self._weights, build.mul(groups, INT64(BLOCK)), INT32)
        ahead = build.mul(build.add(self._block, self._of["num_threads"]), size)
        is_last = build.icmp_signed("<=", left, INT64(CHUNK))
        self._next = build.select(is_last, emit.at(self._address("weight"), ahead, INT32), behind)
        self._begin, self._groups = begin, groups
        are_few = build.icmp_signed("<=", self._rows, INT64(FEW))
        with build.if_else(are_few) as (few, many):
            with few:
                for rows, may_be in self._each(self._rows, 1, FEW):
                    with may_be:
                        self._tile(Tile(rows=rows, vectors=VECTORS, lines=VECTORS), INT64(0), INT64(0), INT64(0))
            with many:
                emit.repeat(INT64(0), INT64(BLOCK // PART), 1, self._multiply_part)
        return ()

    def _multiply_part(self, part: Value) -> Sequence[Value]:
        """Of a block's outputs: so sums of more rows are in registers, and weights are loaded for more of them."""
        build, emit, vectors = self._build, self._emit, PART // WIDTH
        with build.if_else(build.icmp_signed("<=", self._rows, INT64(MOST))) as (one, several):
            with one:
                for rows, may_be in self._each(self._rows, FEW + 1, MOST):
                    with may_be:
                        self._tile(Tile(rows=rows, vectors=vectors, lines=vectors), INT64(0), part, part)
            with several:
                count = build.sdiv(build.add(self._rows, INT64(MOST - 1)), INT64(MOST))
                size = build.sdiv(build.add(self._rows, build.sub(count, INT64(1))), count)

                def multiply(number: Value) -> Sequence[Value]:
                    at_row = build.mul(number, size)
                    found = emit.least(size, build.sub(self._rows, at_row))
                    for rows, may_be in self._each(found, 1, MOST):
                        with may_be:
                            tile = Tile(rows=rows, vectors=vectors, lines=1)
                            self._tile(tile, at_row, part, build.add(build.mul(part, count), number))
                    return ()

                emit.repeat(INT64(0), count, 1, multiply)
        return ()

    def _each(self, found: Value, least: int, most: int) -> Iterator[tuple[int, AbstractContextManager[Any]]]:
        """Each number with what is done where it is the one that was found."""
        for number in range(least, most + 1):
            yield number, self._build.if_then(self._build.icmp_signed("==", found, INT64(number)))

    def _tile(self, tile: Tile, at_row: Value, part: Value, number: Value) -> None:
        """Some rows' sums over the chunk's groups, in registers.

        at_row: the first of them, among those that the block is multiplied by
        part:   of the block's outputs;  number: of the passes over the chunk
        """
        build, emit = self._build, self._emit
        start = build.add(build.mul(build.add(self._first, at_row), self._of["x_stride"]), self._begin)
        inputs = [
            emit.at(self._address("x"), build.add(start, build.mul(self._of["x_stride"], INT64(row))), INT32)
            for row in range(tile.rows)
        ]
        at_output = build.mul(part, INT64(PART))
        sums = emit.at(self._sums, build.add(build.mul(at_row, INT64(BLOCK)), at_output), FLOAT)
        weights = emit.at(self._weights, at_output, INT32)
        places = [row * BLOCK + at * WIDTH for row in range(tile.rows) for at in range(tile.vectors)]
        # lines are fetched in the passes that it takes to fetch all of them, and none in those behind
        done = build.mul(number, INT64(tile.lines))
        is_needed = build.icmp_signed("<", done, INT64(VECTORS))
        step = build.select(is_needed, INT64(tile.lines * LINE), INT64(0))
        reached = emit.at(self._next, build.mul(done, build.mul(self._groups, INT64(LINE))), INT32)
        fetched = build.select(is_needed, reached, self._weights)

        def multiply(at: Value, *totals: Value) -> Sequence[Value]:
            for more in range(UNROLLED):
                group = build.add(at, INT64(more))
                place = emit.at(fetched, build.mul(group, step), INT32)
                for line in range(tile.lines):
                    emit.fetch(emit.at(place, line * LINE, INT32), cache=2)
                totals = tuple(self._group(weights, group, inputs, totals))
            return totals

        is_first = build.icmp_signed("==", self._begin, INT64(0))
        before = [build.select(is_first, ir.Constant(self._sum, None), self._read(sums, place)) for place in places]
        found = emit.repeat(INT64(0), self._groups, UNROLLED, multiply, before)
        for place, total in zip(places, found, strict=True):
            build.store(total, emit.at(sums, place, FLOAT), align=4)

    @property
    def _sum(self) -> Any:
        """The type of a vector of sums."""
        return WORDS if self._numbers.is_whole else self._emit.vector

    def _read(self, sums: Value, place: int) -> Value:
        return self._build.load(self._emit.at(sums, place, FLOAT), typ=self._sum, align=4)

    def _group(self, weights: Value, group: Value, inputs: Sequence[Value], totals: Sequence[Value]) -> list[Value]:
        build, emit, count = self._build, self._emit, len(totals) // len(inputs)
        kind = QUADS if self._numbers.is_whole else self._pairs.vector
        weights = emit.at(weights, build.mul(group, INT64(BLOCK)), INT32)
        vectors = [build.load(emit.at(weights, at * WIDTH, INT32), typ=kind, align=2) for at in range(count)]
        found: list[Value] = []
        for row, base in enumerate(inputs):
            own, word = totals[row * count : (row + 1) * count], emit.at(base, group, INT32)
            found += self._row(word, own, vectors) if len(inputs) > FEW else self._row_by_llvm(word, own, vectors)
        return found

    def _row_by_llvm(self, word: Value, totals: Sequence[Value], vectors: Sequence[Value]) -> list[Value]:
        """A row's sums with one more group, whose word is at that address."""
        build, nothing = self._build, ir.Constant(WORDS, ir.Undefined)
        single = build.insert_element(nothing, build.load(word, typ=INT32, align=2), INT32(0))
        x = build.bitcast(build.shuffle_vector(single, nothing, self._emit.whole(0)), vectors[0].type)
        return [self._dot(total, x, vector) for total, vector in zip(totals, vectors, strict=True)]

    def _dot(self, total: Value, x: Value, weights: Value) -> Value:
        if not self._numbers.is_whole:
            return self._pairs.dot(total, x, weights)
        return self._emit.call("llvm.x86.avx512.vpdpbusd.512", total.type, total, x, weights)

    def _row(self, word: Value, totals: Sequence[Value], vectors: Sequence[Value]) -> list[Value]:
        """A row's sums with one more group, whose word is at that address.

        As instructions of our own, as LLVM would load the words of many rows first, and sums would leave registers.
        """
        name = "vpdpbusd" if self._numbers.is_whole else "vdpbf16ps"
        return multiplied_by_word(self._emit, name, word, totals, vectors)

    def _give(self, at_row: Value) -> Sequence[Value]:
        """Write a row's outputs of the block, those that there are."""
        build, emit = self._build, self._emit
        kind = self._numbers.output
        first, row = build.mul(self._block, INT64(BLOCK)), build.add(self._first, at_row)
        sums = emit.at(self._sums, build.mul(at_row, INT64(BLOCK)), FLOAT)
        number = FLOAT if kind == "float32" else INT16
        output = emit.at(self._address("output"), build.add(build.mul(row, self._of["num_outputs"]), first), number)
        has_bias = build.icmp_signed("!=", self._of["bias"], INT64(0))
        for at in range(0, BLOCK, WIDTH):
            place = build.add(first, INT64(at))
            exists = build.icmp_signed("<", place, self._of["num_outputs"])
            with build.if_then(exists):
                found = self._scaled(sums, at, place, row) if self._numbers.is_whole else emit.floats(sums, at)
                emit.put(found, sums, at)
            with build.if_then(build.and_(exists, has_bias)):
                emit.put(build.fadd(emit.floats(sums, at), emit.floats(self._address("bias"), place)), sums, at)
            with build.if_then(exists):
                emit.write(kind, emit.floats(sums, at), output, at)
        return ()

    def _scaled(self, sums: Value, at: int, place: Value, row: Value) -> Value:
        build, emit = self._build, self._emit
        offsets = build.load(emit.at(self._address("offsets"), place, INT32), typ=WORDS, align=4)
        exact = build.sitofp(build.sub(self._read(sums, at), offsets), emit.vector)
        scale = emit.spread(emit.number(self._address("scales"), row))
        return build.fmul(build.fmul(exact, scale), emit.floats(self._address("factors"), place))
