"""Pairs of bfloat16, which CPUs with AVX512-BF16 multiply and add in one instruction."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from serve_app.kernels.cpu.emitter import INT16, INT32, Emitter, Value


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


ONES = 0x3F803F80
"""The bits of a pair of ones."""


class Pairs:
    """Vectors of them: as many pairs as a vector of float32 has numbers."""

    def __init__(self, emitter: Emitter) -> None:
        self._emit = emitter
        self._build = emitter.builder
        self._width = emitter.width
        self.vector = ir.VectorType(_BFloat(), 2 * emitter.width)

    @property
    def ones(self) -> Value:
        return self._build.bitcast(self._emit.whole(ONES), self.vector)

    def read(self, base: Value, index: Value | int) -> Value:
        """From memory of bfloat16, of which index is a number."""
        return self._build.load(self._emit.at(base, index, INT16), typ=self.vector, align=2)

    def spread(self, base: Value, index: Value) -> Value:
        """A vector of one pair, the index-th in memory."""
        return self._build.bitcast(self._emit.spread(self._emit.number(base, index, INT32)), self.vector)

    def transposed(self, rows: Sequence[Value]) -> list[Value]:
        """As many vectors as one has pairs, each of one pair of every row."""
        kind, size = ir.VectorType(INT32, self._width), self._width
        words = [self._build.bitcast(row, kind) for row in rows]

        def picked(one: Value, other: Value, order: Sequence[int]) -> Value:
            return self._build.shuffle_vector(one, other, ir.Constant(kind, list(order)))

        def unpacked(one: Value, other: Value, step: int) -> list[Value]:
            """The lower halves of each four words by turns, so many at once, and the upper ones."""
            turns = [
                [
                    four + half * 2 + at + more
                    for four in range(0, size, 4)
                    for at in range(0, 2, step)
                    for side in (0, size)
                    for more in range(side, side + step)
                ]
                for half in range(2)
            ]
            return [picked(one, other, order) for order in turns]

        fours = []  # of four rows: vectors whose L-th four words are the rows' words 4 L + k, for k = 0, 1, 2, 3
        for at in range(0, size, 4):
            low, high = unpacked(words[at], words[at + 1], 1), unpacked(words[at + 2], words[at + 3], 1)
            fours.append([*unpacked(low[0], high[0], 2), *unpacked(low[1], high[1], 2)])
        columns: list[Value] = [None] * size
        for number, (first, second, third, fourth) in enumerate(zip(*fours, strict=True)):
            for half in range(2):
                lanes = [8 * half + at for at in range(8)]
                both = [at + side for side in (0, size) for at in lanes]
                upper, lower = picked(first, second, both), picked(third, fourth, both)
                for lane in range(2):
                    order = [4 * lane + at + more for at in range(0, 2 * size, 8) for more in range(4)]
                    columns[4 * (2 * half + lane) + number] = picked(upper, lower, order)
        return [self._build.bitcast(column, self.vector) for column in columns]

    def rounded(self, first: Value, second: Value) -> Value:
        """Two vectors of float32 as bfloat16, one behind the other."""
        return self._emit.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", self.vector, second, first)

    def write(self, vectors: Sequence[Value], base: Value, index: Value) -> None:
        """One vector of float32, or two, to memory of bfloat16, the second behind the first."""
        numbers = self.rounded(vectors[0], vectors[-1])
        if len(vectors) == 1:
            first = ir.Constant(ir.VectorType(INT32, self._width), list(range(self._width)))
            numbers = self._build.shuffle_vector(numbers, numbers, first)
        self._build.store(numbers, self._emit.at(base, index, INT16), align=2)

    def interleaved(self, first: Value, second: Value) -> list[Value]:
        """Pairs of the first half of two vectors' numbers, and of the second."""
        kind, size = ir.VectorType(INT32, 2 * self._width), 2 * self._width
        halves = (range(self._width), range(self._width, size))
        return [
            self._build.shuffle_vector(
                first, second, ir.Constant(kind, [at + more for at in half for more in (0, size)])
            )
            for half in halves
        ]

    def interleaved_halves(self, base: Value, indices: Sequence[Value]) -> Value:
        """As many numbers as a vector has pairs, from two places of a memory of bfloat16, as pairs of both."""
        half = ir.VectorType(_BFloat(), self._width)
        first, second = (self._build.load(self._emit.at(base, at, INT16), typ=half, align=2) for at in indices)
        order = [at + more for at in range(self._width) for more in (0, self._width)]
        return self._build.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT32, 2 * self._width), order))

    def dot(self, total: Value, x: Value, y: Value) -> Value:
        """Sums in float32, and what pairs multiplied add to each."""
        return self._emit.call("llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, x, y)


def multiplied_by_word(
    emitter: Emitter, name: str, word: Value, totals: Sequence[Value], vectors: Sequence[Value]
) -> list[Value]:
    """Vectors of sums, and what an instruction of that name adds to each, of a vector and the word at an address."""
    build, count = emitter.builder, len(totals)
    # operands: the sums, a vector for the word, the sums before, the vectors, the word's address
    lines = [f"vbroadcastss (${3 * count + 1}), ${count}"]
    lines += [f"{name} ${2 * count + 1 + at}, ${count}, ${at}" for at in range(count)]
    places = ["=&v"] * (count + 1) + [str(at) for at in range(count)] + ["v"] * count + ["r"]
    given = [*totals, *vectors, word]
    results = ir.LiteralStructType([*(total.type for total in totals), emitter.vector])
    form = ir.FunctionType(results, [value.type for value in given])
    found = build.call(ir.InlineAsm(form, "\n".join(lines), ",".join(places)), given)
    return [build.extract_value(found, at) for at in range(count)]
