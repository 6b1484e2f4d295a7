"""What lies between a decoder's products, each in one pass over a token's numbers: norms, rotations, gates.

Threads take one token after the other. Sums are float32's; what torch rounds to the type of the stream on its way is
rounded here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from llvmlite import ir

from serve_app.engine.cpu.emitter import FLOAT, INT8, INT16, INT32, INT64, POINTER, Emitter, Kind, Value

NORM, ADD_AND_NORM, TURN, GATE = "norm", "add_and_norm", "turn", "gate"
DIVIDE, ROUND, MULTIPLY, KEEP, NORM_HEADS = "divide", "round", "multiply", "keep", "norm_heads"
SHARED = ("counter", "num_tokens")
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    NORM: (*SHARED, "stream", "output", "weight", "size", "eps"),
    ADD_AND_NORM: (*SHARED, "stream", "output", "weight", "size", "eps", "change", "factor"),
    TURN: (*SHARED, "heads", "stride", "num_heads", "dim", "half", "cos", "sin"),
    GATE: (*SHARED, "inputs", "output", "size"),
    DIVIDE: (*SHARED, "inputs", "output", "size", "scales", "levels"),
    ROUND: (*SHARED, "inputs", "output", "size", "scales", "levels", "stride"),
    MULTIPLY: (*SHARED, "sums", "output", "size", "scales", "bias"),
    KEEP: (*SHARED, "key", "value", "stride", "size", "keys", "values", "places"),
    NORM_HEADS: (
        *SHARED,
        "heads",
        "stride",
        "num_queries",
        "num_heads",
        "dim",
        "eps",
        "query_weight",
        "key_weight",
    ),
}
"""Each int64: addresses, numbers of a token, and bits of a float32 (eps, factor).

norm:         output = stream / √(Σ stream² + eps) · weight;  weight: float32, times √size
add_and_norm: stream += change · factor, and the norm of that
turn:         heads of a token, dim apart, in place: the first `half` of dimensions with the next one
              cos, sin: [num_tokens, 2 · half], sin negative in its first half
gate:         inputs [2 · size] to output [size]: silu of the first half, times the second
divide:       output, float32, = inputs / scale;  scale = the largest of |inputs| / levels, one of a token
round:        output, uint8, = the nearest whole numbers of inputs / scale, and 128; stride apart
multiply:     output = sums · scale + bias; sums and bias float32, no bias at address 0
keep:         keys and values at a token's place, int64, become its own, which lie stride apart; as they are, bit by bit
norm_heads:   heads of a token, dim apart, in place: the norm of each, with a weight for queries and one for the others
"""
LEAST_NORMAL = 2.0**-126
NUM_SUMS = 4
"""Vectors that squares are added up in, so that one addition need not await the one before."""

Body: TypeAlias = Callable[["_Function", Value], None]


def emit(kind: Kind, width: int) -> Any:
    """The module of LLVM's with a function for each name, of its parameters' address.

    kind: of the numbers in memory;  width: float32 of a vector, of which sizes are multiples
    """
    module = ir.Module("tokens")
    for name, body in BODIES.items():
        _Function(module, name, kind, width).write(body)
    return module


class _Function:
    """Writes one function: parameters are read, and a body is repeated for each token that it takes."""

    def __init__(self, module: Any, name: str, kind: Kind, width: int) -> None:
        self.emit, given = Emitter.of_function(module, name, width)
        self.build = self.emit.builder
        self.name = name
        self.kind = kind
        self.width = width
        self.number = FLOAT if kind == "float32" else INT16
        self.of = {each: self.emit.number(given, at, INT64) for at, each in enumerate(PARAMETERS[name])}

    def write(self, body: Body) -> None:
        self.emit.take_items(self.address("counter"), self.of["num_tokens"], lambda token: body(self, token))

    def address(self, name: str) -> Value:
        return self.build.inttoptr(self.of[name], POINTER)

    def row(self, name: str, token: Value, size: Value) -> Value:
        """Where a token's numbers begin."""
        return self.emit.at(self.address(name), self.build.mul(token, size), self.number)

    def spread_bits(self, name: str) -> Value:
        """A vector of the float32 whose bits a parameter has."""
        return self.emit.spread(self.build.bitcast(self.build.trunc(self.of[name], INT32), FLOAT))


def _norm(function: _Function, token: Value) -> None:
    size = function.of["size"]
    stream, output = function.row("stream", token, size), function.row("output", token, size)
    read = _adding(function, token, stream) if function.name == ADD_AND_NORM else _reading(function, stream)
    _write_norm(function, read, (stream, output), size, "weight")


def _norm_heads(function: _Function, token: Value) -> None:
    build, dim = function.build, function.of["dim"]
    heads = function.row("heads", token, function.of["stride"])

    def norm(weight: str, number: Value) -> Sequence[Value]:
        head = function.emit.at(heads, build.mul(number, dim), function.number)
        _write_norm(function, _reading(function, head), (head, head), dim, weight)
        return ()

    num_queries = function.of["num_queries"]
    function.emit.repeat(INT64(0), num_queries, 1, functools.partial(norm, "query_weight"))
    function.emit.repeat(num_queries, function.of["num_heads"], 1, functools.partial(norm, "key_weight"))


def _write_norm(
    function: _Function, read: Callable[[Value], Value], places: tuple[Value, Value], size: Value, weight: str
) -> None:
    """read: gives a vector of the numbers, which are then at the first of `places`;  the norm goes to the second"""
    build, emit = function.build, function.emit
    source, output = places

    def square(at: Value, total: Value) -> Sequence[Value]:
        found = read(at)
        return [emit.fused(found, found, total)]

    def squares(at: Value, *totals: Value) -> Sequence[Value]:
        return [square(build.add(at, INT64(number * function.width)), total)[0] for number, total in enumerate(totals)]

    together = NUM_SUMS * function.width
    whole = build.mul(build.sdiv(size, INT64(together)), INT64(together))
    totals = emit.repeat(INT64(0), whole, together, squares, [emit.all_of(0.0)] * NUM_SUMS)
    (total,) = emit.repeat(whole, size, function.width, square, [_sum(build, totals)])
    factor = build.fdiv(
        emit.all_of(1.0), emit.root(build.fadd(emit.spread(emit.total(total)), function.spread_bits("eps")))
    )

    def scale(at: Value) -> Sequence[Value]:
        scaled = build.fmul(emit.read(function.kind, source, at), factor)
        emit.write(function.kind, build.fmul(scaled, emit.floats(function.address(weight), at)), output, at)
        return ()

    emit.repeat(INT64(0), size, function.width, scale)


def _reading(function: _Function, stream: Value) -> Callable[[Value], Value]:
    return lambda at: function.emit.read(function.kind, stream, at)


def _adding(function: _Function, token: Value, stream: Value) -> Callable[[Value], Value]:
    """Reads what the stream is once the change was added, which is written there."""
    emit, kind = function.emit, function.kind
    change, factor = function.row("change", token, function.of["size"]), function.spread_bits("factor")

    def read(at: Value) -> Value:
        added = emit.fused(emit.read(kind, change, at), factor, emit.read(kind, stream, at))
        emit.write(kind, added, stream, at)
        return emit.rounded(kind, added)

    return read


def _sum(build: Any, vectors: Sequence[Value]) -> Value:
    first, second, third, fourth = vectors
    return build.fadd(build.fadd(first, second), build.fadd(third, fourth))


def _turn(function: _Function, token: Value) -> None:
    build, emit, kind, half = function.build, function.emit, function.kind, function.of["half"]
    heads = function.row("heads", token, function.of["stride"])
    angles = build.mul(half, INT64(2))
    cos, sin = function.row("cos", token, angles), function.row("sin", token, angles)

    def turn_head(number: Value) -> Sequence[Value]:
        head = emit.at(heads, build.mul(number, function.of["dim"]), function.number)

        def turn(at: Value) -> Sequence[Value]:
            places = (at, build.add(at, half))
            first, second = (emit.read(kind, head, place) for place in places)
            for place, own, other in zip(places, (first, second), (second, first), strict=True):
                kept = emit.rounded(kind, build.fmul(own, emit.read(kind, cos, place)))
                emit.write(kind, emit.fused(other, emit.read(kind, sin, place), kept), head, place)
            return ()

        emit.repeat(INT64(0), half, function.width, turn)
        return ()

    emit.repeat(INT64(0), function.of["num_heads"], 1, turn_head)


def _gate(function: _Function, token: Value) -> None:
    build, emit, kind, size = function.build, function.emit, function.kind, function.of["size"]
    gates, output = function.row("inputs", token, build.mul(size, INT64(2))), function.row("output", token, size)
    factors = emit.at(gates, size, function.number)

    def gate(at: Value) -> Sequence[Value]:
        found = emit.read(kind, gates, at)
        power = emit.power_of_two(build.fmul(build.fneg(emit.magnitude(found)), emit.all_of(1 / math.log(2))))
        one = emit.all_of(1.0)
        share = build.fdiv(emit.chosen(found, one, power), build.fadd(one, power))
        passed = emit.rounded(kind, build.fmul(found, share))
        emit.write(kind, build.fmul(passed, emit.read(kind, factors, at)), output, at)
        return ()

    emit.repeat(INT64(0), size, function.width, gate)


def _divide(function: _Function, token: Value) -> None:
    build, emit, size = function.build, function.emit, function.of["size"]
    divided = _divided(function, token)
    output = emit.at(function.address("output"), build.mul(token, size), FLOAT)

    def give(at: Value) -> Sequence[Value]:
        emit.put(divided(at), output, at)
        return ()

    emit.repeat(INT64(0), size, function.width, give)


def _round(function: _Function, token: Value) -> None:
    build, emit = function.build, function.emit
    divided = _divided(function, token)
    output = emit.at(function.address("output"), build.mul(token, function.of["stride"]), INT8)

    def give(at: Value) -> Sequence[Value]:
        build.store(emit.bytes_above(divided(at)), emit.at(output, at, INT8), align=1)
        return ()

    emit.repeat(INT64(0), function.of["size"], function.width, give)


def _divided(function: _Function, token: Value) -> Callable[[Value], Value]:
    """Finds a token's scale, and reads its numbers over that."""
    build, emit, size = function.build, function.emit, function.of["size"]
    inputs = function.row("inputs", token, size)

    def largest(at: Value, so_far: Value) -> Sequence[Value]:
        return [emit.maximum(so_far, emit.magnitude(emit.read(function.kind, inputs, at)))]

    (found,) = emit.repeat(INT64(0), size, function.width, largest, [emit.all_of(0.0)])
    level = build.fdiv(emit.spread(emit.greatest(found)), function.spread_bits("levels"))
    scale = emit.maximum(level, emit.all_of(LEAST_NORMAL))
    emit.put(emit.first(scale), function.address("scales"), token)
    return lambda at: build.fdiv(emit.read(function.kind, inputs, at), scale)


def _multiply(function: _Function, token: Value) -> None:
    build, emit, size = function.build, function.emit, function.of["size"]
    sums = emit.at(function.address("sums"), build.mul(token, size), FLOAT)
    output = function.row("output", token, size)
    scale = emit.spread(emit.number(function.address("scales"), token))

    def multiply(biased: bool, at: Value) -> Sequence[Value]:
        found = emit.floats(sums, at)
        scaled = (
            emit.fused(found, scale, emit.floats(function.address("bias"), at)) if biased else build.fmul(found, scale)
        )
        emit.write(function.kind, scaled, output, at)
        return ()

    has_bias = build.icmp_signed("!=", function.of["bias"], INT64(0))
    with build.if_else(has_bias) as (then, otherwise):
        for branch, biased in ((then, True), (otherwise, False)):
            with branch:
                emit.repeat(INT64(0), size, function.width, functools.partial(multiply, biased))


def _keep(function: _Function, token: Value) -> None:
    build, emit, size = function.build, function.emit, function.of["size"]
    place = emit.number(function.address("places"), token, INT64)
    bits = ir.VectorType(function.number, function.width)
    for new, kept in (("key", "keys"), ("value", "values")):
        source, target = function.row(new, token, function.of["stride"]), function.row(kept, place, size)

        def copy(at: Value, source: Value = source, target: Value = target) -> Sequence[Value]:
            found = build.load(emit.at(source, at, function.number), typ=bits, align=2)
            build.store(found, emit.at(target, at, function.number), align=2)
            return ()

        emit.repeat(INT64(0), size, function.width, copy)


BODIES: Mapping[str, Body] = {
    NORM: _norm,
    ADD_AND_NORM: _norm,
    TURN: _turn,
    GATE: _gate,
    DIVIDE: _divide,
    ROUND: _round,
    MULTIPLY: _multiply,
    KEEP: _keep,
    NORM_HEADS: _norm_heads,
}
