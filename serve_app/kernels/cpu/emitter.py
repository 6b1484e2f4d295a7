"""Writes LLVM's instructions: numbers in memory, vectors of float32, loops. LLVM splits vectors that a CPU lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from llvmlite import ir

ir.types.ir_layer_typed_pointers_enabled = False  # as LLVM has had it since 15, and llvmlite will

Kind: TypeAlias = Literal["bfloat16", "float16", "float32"]
"""Of numbers in memory; computed with are float32."""
Value: TypeAlias = Any
"""Of LLVM: what an instruction gives."""
Body: TypeAlias = Callable[..., Sequence[Value] | None]
"""Of a loop: from an index and what is carried on to what is carried on from it."""

INT16, INT32, INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT, POINTER = ir.FloatType(), ir.PointerType()
LEAST_POWER = -126.0
"""Of two, that float32 has in full."""
ROUNDER = 1.5 * 2.0**23
"""Added to a number of some size, it leaves the nearest whole one in the lowest bits."""
POWERS = tuple(math.log(2) ** power / math.factorial(power) for power in range(7))
"""Of 2^x between -1/2 and 1/2: off by 1.2e-7 at most, as float32 is."""


class Emitter:
    """Writes the only function of a module. Addresses are of LLVM's kind, indices and counts int64.

    of: the function's parameters, by their names
    """

    def __init__(self, name: str, parameters: Sequence[str], *, width: int, kind: Kind) -> None:
        """Begin a function whose one argument is the address of its parameters, each int64.

        width: numbers of a vector;  kind: of numbers in memory
        """
        self.module = ir.Module(name)
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [POINTER]), name)
        function.attributes.add("nounwind")
        set.add(function.attributes, '"no-builtins"')  # which llvmlite does not know: no loop becomes a call of memset
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.width = width
        self.kind = kind
        self.vector = ir.VectorType(FLOAT, width)
        self._element = FLOAT if kind == "float32" else INT16
        self._ints = ir.VectorType(INT32, width)
        self._shorts = ir.VectorType(INT16, width)
        self.of = {each: self.number(function.args[0], at, INT64) for at, each in enumerate(parameters)}

    def take_items(self, count: Value, body: Callable[[Value], None]) -> Any:
        """The rest of a function: take the next item's number, for as long as there is one, and do this.

        Threads take from the int64 at the parameter `counter`. Returns the module.
        """
        build, counter = self.builder, self.address("counter")
        again, go, done = (build.append_basic_block(name) for name in ("again", "go", "done"))
        build.branch(again)
        build.position_at_end(again)
        item = build.atomic_rmw("add", counter, INT64(1), "monotonic")
        build.cbranch(build.icmp_signed("<", item, count), go, done)
        build.position_at_end(done)
        build.ret_void()
        build.position_at_end(go)
        body(item)
        build.branch(again)
        return self.module

    def address(self, name: str) -> Value:
        """The address that is a parameter."""
        return self.builder.inttoptr(self.of[name], POINTER)

    def row(self, name: str, number: Value, columns: Sequence[str]) -> dict[str, Value]:
        """A row, of int64, of the table at an address that is a parameter, by the names of the columns."""
        begin = self.at(self.address(name), self.builder.mul(number, INT64(len(columns))), INT64)
        return {column: self.number(begin, at, INT64) for at, column in enumerate(columns)}

    def at(self, base: Value, index: Value | int, kind: Any = None) -> Value:
        """The address of the index-th number, of a type of LLVM's if they are none of those in memory."""
        index = INT64(index) if isinstance(index, int) else index
        return self.builder.gep(base, [index], source_etype=kind or self._element)

    def local(self, count: int) -> Value:
        """Memory for so many float32 that ends with the function."""
        memory = self.builder.alloca(FLOAT, count)
        memory.align = 64
        return self.builder.inttoptr(self.builder.ptrtoint(memory, INT64), POINTER)

    def number(self, base: Value, index: Value | int, kind: Any = FLOAT) -> Value:
        return self.builder.load(self.at(base, index, kind), typ=kind)

    def floats(self, base: Value, index: Value | int) -> Value:
        """A vector of float32."""
        return self.builder.load(self.at(base, index, FLOAT), typ=self.vector, align=4)

    def put(self, value: Value, base: Value, index: Value | int) -> None:
        """A float32, or a vector of them."""
        self.builder.store(value, self.at(base, index, FLOAT), align=4)

    def read(self, base: Value, index: Value | int) -> Value:
        """A vector of float32 from numbers in memory."""
        build = self.builder
        if self.kind == "float32":
            return self.floats(base, index)
        if self.kind == "float16":
            halves = ir.VectorType(ir.HalfType(), self.width)
            return build.fpext(build.load(self.at(base, index, INT16), typ=halves, align=2), self.vector)
        shorts = build.load(self.at(base, index, INT16), typ=self._shorts, align=2)
        return build.bitcast(build.shl(build.zext(shorts, self._ints), self.whole(16)), self.vector)

    def write(self, vector: Value, base: Value, index: Value | int) -> None:
        """A vector of float32 to numbers in memory, to the nearest, of two the even."""
        if self.kind == "float32":
            self.put(vector, base, index)
        else:
            self.builder.store(self._narrowed(vector), self.at(base, index, INT16), align=2)

    def _narrowed(self, vector: Value) -> Value:
        build = self.builder
        if self.kind == "float16":
            return build.fptrunc(vector, ir.VectorType(ir.HalfType(), self.width))
        bits = build.bitcast(vector, self._ints)
        odd = build.and_(build.lshr(bits, self.whole(16)), self.whole(1))
        nearest = build.lshr(build.add(bits, build.add(odd, self.whole(0x7FFF))), self.whole(16))
        is_number = build.fcmp_ordered("ord", vector, vector)
        no_number = ir.Constant(self._shorts, [0x7FC0] * self.width)
        return build.select(is_number, build.trunc(nearest, self._shorts), no_number)

    def fetch(self, place: Value) -> None:
        """Bring a line of memory into the second cache; nothing happens where there is no memory."""
        self.call("llvm.prefetch.p0", ir.VoidType(), place, INT32(0), INT32(2), INT32(1))

    def all_of(self, number: float) -> Value:
        """A vector of one number."""
        return ir.Constant(self.vector, [number] * self.width)

    def whole(self, number: int) -> Value:
        """A vector of one whole number."""
        return ir.Constant(self._ints, [number] * self.width)

    @property
    def whole_numbers(self) -> Value:
        """0, 1, 2, …"""
        return ir.Constant(self._ints, list(range(self.width)))

    def spread(self, number: Value) -> Value:
        """A vector of one number that is computed."""
        nothing = ir.Constant(ir.VectorType(number.type, self.width), ir.Undefined)
        return self.builder.shuffle_vector(
            self.builder.insert_element(nothing, number, INT32(0)), nothing, self.whole(0)
        )

    def first(self, vector: Value) -> Value:
        return self.builder.extract_element(vector, INT32(0))

    def fused(self, x: Value, y: Value, z: Value) -> Value:
        """x · y + z, rounded once."""
        return self.call(f"llvm.fma.v{self.width}f32", self.vector, x, y, z)

    def least(self, x: Value, y: Value) -> Value:
        """Of two whole numbers."""
        return self.builder.select(self.builder.icmp_signed("<", x, y), x, y)

    def larger(self, x: Value, y: Value) -> Value:
        """Of two vectors, or two numbers; the other where one is no number."""
        suffix = "f32" if x.type == FLOAT else f"v{self.width}f32"
        return self.call(f"llvm.maxnum.{suffix}", x.type, x, y)

    def largest(self, vector: Value) -> Value:
        return self.call(f"llvm.vector.reduce.fmax.v{self.width}f32", FLOAT, vector)

    def folded(self, vector: Value) -> Value:
        """Its sum, one half added to the other until one number is left: the same bits wherever it is computed."""
        build, size = self.builder, vector.type.count
        while size > 1:
            size //= 2
            low, high = (
                build.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(INT32, size), list(numbers)))
                for numbers in (range(size), range(size, 2 * size))
            )
            vector = build.fadd(low, high)
        return self.first(vector)

    def totals(self, vectors: Sequence[Value]) -> Value:
        """The sums of as many vectors as one has numbers, in their order; each by halves, as `folded` has it."""
        build = self.builder
        while len(vectors) > 1:
            size = len(vectors)  # numbers of each sum that are left in a vector
            firsts = [at + number for at in range(0, 2 * self.width, size) for number in range(size // 2)]
            low, high = (
                ir.Constant(ir.VectorType(INT32, self.width), [first + more for first in firsts])
                for more in (0, size // 2)
            )
            vectors = [
                build.fadd(build.shuffle_vector(*pair, low), build.shuffle_vector(*pair, high))
                for pair in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors[0]

    def transposed(self, vectors: Sequence[Value]) -> list[Value]:
        """As many vectors as one has numbers: of each of these a vector."""
        build, found, half = self.builder, list(vectors), self.width // 2
        while half:
            # of a pair: where the first keeps its own, and where it takes the second's; then the same for the second
            taken = ((0, self.width - half), (half, self.width))
            low, high = (
                ir.Constant(ir.VectorType(INT32, self.width), [at + more[at & half > 0] for at in range(self.width)])
                for more in taken
            )
            for at in (at for at in range(self.width) if not at & half):
                pair = found[at], found[at + half]
                found[at], found[at + half] = (build.shuffle_vector(*pair, places) for places in (low, high))
            half //= 2
        return found

    def power_of_two(self, vector: Value) -> Value:
        """2^x of numbers that are not above 0, by a polynomial of what is left of the nearest whole number.

        It is 0 where it would be no normal number: sums of such take CPUs many times as long.
        """
        build = self.builder
        is_small = build.fcmp_ordered("<", vector, self.all_of(LEAST_POWER))
        bounded = build.select(is_small, self.all_of(LEAST_POWER), vector)
        shifted = build.fadd(bounded, self.all_of(ROUNDER))
        rest = build.fsub(bounded, build.fsub(shifted, self.all_of(ROUNDER)))
        power = self.all_of(POWERS[-1])
        for factor in reversed(POWERS[:-1]):
            power = self.fused(power, rest, self.all_of(factor))
        exponent = build.shl(build.add(build.bitcast(shifted, self._ints), self.whole(127)), self.whole(23))
        return build.select(is_small, self.all_of(0.0), build.fmul(power, build.bitcast(exponent, self.vector)))

    def repeat(self, start: Value, stop: Value, step: int, body: Body, carried: Sequence[Value] = ()) -> list[Value]:
        """For each index from … to: body(index, *carried) gives what is carried on. Returns what is carried last."""
        build = self.builder
        before = build.block
        head, inside, behind = (build.append_basic_block(name) for name in ("head", "inside", "behind"))
        build.branch(head)
        build.position_at_end(head)
        index, *kept = (build.phi(value.type) for value in (start, *carried))
        for phi, value in zip((index, *kept), (start, *carried), strict=True):
            phi.add_incoming(value, before)
        build.cbranch(build.icmp_signed("<", index, stop), inside, behind)
        build.position_at_end(inside)
        new = body(index, *kept)
        following = build.add(index, INT64(step))
        for phi, value in zip((index, *kept), (following, *(new or ())), strict=True):
            phi.add_incoming(value, build.block)
        build.branch(head)
        build.position_at_end(behind)
        return kept

    def call(self, name: str, result: Any, *values: Value) -> Value:
        """One of LLVM's own functions."""
        form = ir.FunctionType(result, [value.type for value in values])
        return self.builder.call(self.module.globals.get(name) or ir.Function(self.module, form, name), values)


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
