"""Pairs of bfloat16, which CPUs with AVX512-BF16 multiply and add up in one instruction."""

from __future__ import annotations

from llvmlite import ir

from serve_app.engine.cpu.emitter import INT16, INT32, Emitter, Value


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

    def rounded(self, first: Value, second: Value) -> Value:
        """Two vectors of float32 as bfloat16, one behind the other."""
        return self._emit.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", self.vector, second, first)

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

    def dot(self, total: Value, x: Value, y: Value) -> Value:
        """Sums in float32, and what pairs multiplied add to each."""
        return self._emit.call("llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, x, y)
