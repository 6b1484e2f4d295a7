"""Passes over rows of logits: weights of tokens, ids of tokens, and counts of distinct values.

Threads take one row after the other. What is found for a row depends on the row alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, TypeAlias

import torch
from llvmlite import ir
from torch import Tensor

from serve_app.kernels.cpu.compiling import Code, Kernel, Machine, tried
from serve_app.kernels.cpu.emitter import FLOAT, INT32, INT64, LEAST_POWER, POINTER, Emitter, Value
from serve_app.kernels.forms import ALL, Counted, InPlay, bounds_of

WEIGH, LIST, COUNT = "weigh", "list", "count"
SHARED = ("counter", "num_items", "logits", "stride", "rows", "num_columns")
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    WEIGH: (*SHARED, "bounds", "ends", "highest", "divisors", "sums", "num_sums"),
    LIST: (*SHARED, "bounds", "ends", "first", "size", "found"),
    COUNT: (*SHARED, "nothing", "tallies", "values", "numbers", "others", "found"),
}
"""Each int64: addresses, and how many. Of item i is row rows[i] of the logits, float32, `stride` apart.

weigh: sums [items, num_sums] float32 = Σ exp((logit - highest) / divisor) over BLOCK columns each of the tokens in play
       highest, divisors: [items] float32;  bounds: [items, 2] float32, the lowest and the highest logit in play
       ends: [items, 4] int32, the first and the last id in play of the lowest logit, and of the highest
list:  found [items, size + 1] int32: ids of tokens in play from the first on, which is a number; one behind the last
       holds anything
count: values [items, MOST_VALUES] float32 by falling value, and numbers [items, MOST_VALUES] int32 of tokens that have
       them, of values with at most 16 bits; ids of all other tokens in others [items, MOST_OTHERS] int32
       found: [items, 2] int32, how many values and others there are; where these are the most or more, not all are told
       tallies: [items, NUM_TALLIES] int32, holding anything;  nothing: 0, which LLVM does not know: there is no memset
"""
BLOCK = 64
"""Columns."""
MOST_VALUES = 8192
MOST_OTHERS = 4096
NUM_BINS = 1 << 16
NUM_TALLIES = NUM_BINS + 1
"""One for each value of 16 bits, and one that nobody reads."""
SIGN = 1 << 15

Body: TypeAlias = Callable[["_Function", Value], None]


def emit(width: int) -> Any:
    """The module of LLVM's with a function for each name, of its parameters' address; width: float32 of a vector"""
    module = ir.Module("vocabulary")
    for name, body in BODIES.items():
        _Function(module, name, width).write(body)
    return module


class _Function:
    """Writes one function: parameters are read, and a body is repeated for each row that it takes."""

    def __init__(self, module: Any, name: str, width: int) -> None:
        self.emit, given = Emitter.of_function(module, name, width)
        self.build = self.emit.builder
        self.width = width
        self.ints = ir.VectorType(INT32, width)
        self.of = {each: self.emit.number(given, at, INT64) for at, each in enumerate(PARAMETERS[name])}

    def write(self, body: Body) -> None:
        self.emit.take_items(self.address("counter"), self.of["num_items"], lambda item: body(self, item))

    def address(self, name: str) -> Value:
        return self.build.inttoptr(self.of[name], POINTER)

    def row(self, item: Value) -> Value:
        """Where the item's logits begin."""
        number = self.emit.number(self.address("rows"), item, INT64)
        return self.emit.at(self.address("logits"), self.build.mul(number, self.of["stride"]), FLOAT)

    def part(self, name: str, item: Value, size: Value | int, kind: Any) -> Value:
        """Where an item's part of an array begins."""
        size = INT64(size) if isinstance(size, int) else size
        return self.emit.at(self.address(name), self.build.mul(item, size), kind)


class _Tokens:
    """The tokens of a row, a vector at a time, and which of them are in play."""

    def __init__(self, function: _Function, item: Value) -> None:
        self._function = function
        self._row = function.row(item)
        emit = function.emit
        bounds, ends = function.part("bounds", item, 2, FLOAT), function.part("ends", item, 4, INT32)
        self._bounds = [emit.spread(emit.number(bounds, at)) for at in range(2)]
        self._ends = [function.emit.spread(emit.number(ends, at, INT32)) for at in range(4)]
        self._counted = ir.Constant(function.ints, list(range(function.width)))
        self._num_columns = function.emit.spread(function.build.trunc(function.of["num_columns"], INT32))

    def read(self, first: Value, *, is_whole: bool) -> tuple[Value, Value]:
        """Logits from a column on, and whether they are in play; minus infinity is none.

        is_whole: all of these columns exist
        """
        function, emit, build = self._function, self._function.emit, self._function.build
        ids = build.add(function.emit.spread(build.trunc(first, INT32)), self._counted)
        logits = emit.floats(self._row, first) if is_whole else self._existing(first, ids)
        are_numbers = build.fcmp_ordered(">", logits, emit.all_of(-math.inf))
        are_inside = build.and_(self._are_inside(logits, ids, 0), self._are_inside(logits, ids, 1))
        return logits, build.and_(are_numbers, are_inside)

    def _are_inside(self, logits: Value, ids: Value, side: int) -> Value:
        """Whether tokens are on the inner side of a bound, or have it and an id in play."""
        build, bound = self._function.build, self._bounds[side]
        first, last = self._ends[2 * side : 2 * side + 2]
        are_within = build.and_(build.icmp_signed(">=", ids, first), build.icmp_signed("<=", ids, last))
        have_bound = build.and_(build.fcmp_ordered("==", logits, bound), are_within)
        return build.or_(build.fcmp_ordered("<>"[1 - side], logits, bound), have_bound)

    def _existing(self, first: Value, ids: Value) -> Value:
        """Logits of the columns that there are, and minus infinity."""
        function, build = self._function, self._function.build
        exist = build.icmp_signed("<", ids, self._num_columns)
        vector = function.emit.vector
        kind = ir.FunctionType(vector, [POINTER, INT32, exist.type, vector])
        name = f"llvm.masked.load.v{function.width}f32.p0"
        load = build.module.globals.get(name) or ir.Function(build.module, kind, name)
        nothing = function.emit.all_of(-math.inf)
        return build.call(load, [function.emit.at(self._row, first, FLOAT), INT32(4), exist, nothing])


def _weigh(function: _Function, item: Value) -> None:
    build, emit = function.build, function.emit
    tokens = _Tokens(function, item)
    highest = emit.spread(emit.number(function.address("highest"), item))
    factor = emit.spread(build.fdiv(FLOAT(math.log2(math.e)), emit.number(function.address("divisors"), item)))
    sums = function.part("sums", item, function.of["num_sums"], FLOAT)
    num_whole = build.sdiv(function.of["num_columns"], INT64(BLOCK))

    def weights(first: Value, *, is_whole: bool) -> Value:
        logits, are_in_play = tokens.read(first, is_whole=is_whole)
        power = build.fmul(build.fsub(logits, highest), factor)
        are_heavy = build.fcmp_ordered(">=", power, emit.all_of(LEAST_POWER))
        return build.select(build.and_(are_heavy, are_in_play), emit.power_of_two(power), emit.all_of(0.0))

    def put(number: Value, *, is_whole: bool) -> Sequence[Value]:
        first = build.mul(number, INT64(BLOCK))
        parts = [weights(build.add(first, INT64(at)), is_whole=is_whole) for at in range(0, BLOCK, function.width)]
        emit.put(emit.total(functools.reduce(build.fadd, parts)), sums, number)
        return ()

    emit.repeat(INT64(0), num_whole, 1, functools.partial(put, is_whole=True))
    emit.repeat(num_whole, function.of["num_sums"], 1, functools.partial(put, is_whole=False))


def _list(function: _Function, item: Value) -> None:
    build, emit, width = function.build, function.emit, function.width
    tokens = _Tokens(function, item)
    size = function.of["size"]
    found = function.part("found", item, build.add(size, INT64(1)), INT32)

    def look(first: Value, num_before: Value, *, is_whole: bool) -> Sequence[Value]:
        _, are_in_play = tokens.read(first, is_whole=is_whole)
        bits = build.zext(build.bitcast(are_in_play, ir.IntType(width)), INT64)

        def note(lane: Value, number: Value) -> Sequence[Value]:
            """Written is what is not in play, too, and then written over."""
            place = build.sub(number, function.of["first"])
            place = build.select(build.icmp_signed("<", place, INT64(0)), INT64(0), function.emit.least(place, size))
            build.store(build.trunc(build.add(first, lane), INT32), emit.at(found, place, INT32))
            return (build.add(number, build.and_(build.lshr(bits, lane), INT64(1))),)

        lanes = build.select(build.icmp_signed("==", bits, INT64(0)), INT64(0), INT64(width))
        return emit.repeat(INT64(0), lanes, 1, note, [num_before])

    count = function.of["num_columns"]
    whole = build.mul(build.sdiv(count, INT64(width)), INT64(width))
    number = emit.repeat(INT64(0), whole, width, functools.partial(look, is_whole=True), [INT64(0)])
    emit.repeat(whole, count, width, functools.partial(look, is_whole=False), number)


class _Tally:
    """Counts a row's values, and notes the tokens of others."""

    def __init__(self, function: _Function, item: Value) -> None:
        self._function = function
        self._row = function.row(item)
        self._tallies = function.part("tallies", item, NUM_TALLIES, INT32)
        self._others = function.part("others", item, MOST_OTHERS, INT32)

    def begin(self) -> None:
        """Nothing is counted."""
        function, emit = self._function, self._function.emit
        nothing = function.emit.spread(function.build.trunc(function.of["nothing"], INT32))

        def clear(place: Value) -> Sequence[Value]:
            function.build.store(nothing, emit.at(self._tallies, place, INT32), align=4)
            return ()

        emit.repeat(INT64(0), INT64(NUM_BINS), self._function.width, clear)

    def all(self) -> Value:
        """Count all columns. Returns how many of them are others."""
        emit, build, width = self._function.emit, self._function.build, self._function.width
        count = self._function.of["num_columns"]
        whole = build.mul(build.sdiv(count, INT64(width)), INT64(width))
        (number,) = emit.repeat(INT64(0), whole, width, self._vector, [INT64(0)])
        (number,) = emit.repeat(whole, count, 1, self._one, [number])
        return number

    def _vector(self, first: Value, num_others: Value) -> Sequence[Value]:
        """As many columns as a vector has: at once where none of them is another."""
        function, build = self._function, self._function.build
        bits = build.bitcast(
            build.fadd(function.emit.floats(self._row, first), function.emit.all_of(0.0)), function.ints
        )
        low = build.and_(bits, function.emit.whole(NUM_BINS - 1))
        kind = ir.FunctionType(INT32, [function.ints])
        name = f"llvm.vector.reduce.or.v{function.width}i32"
        reduce = build.module.globals.get(name) or ir.Function(build.module, kind, name)
        are_short = build.icmp_signed("==", build.call(reduce, [low]), INT32(0))
        one_by_one, together, behind = (build.append_basic_block(each) for each in ("single", "together", "behind"))
        build.cbranch(are_short, together, one_by_one)
        build.position_at_end(together)
        flips = build.or_(build.ashr(bits, function.emit.whole(31)), function.emit.whole(1 << 31))
        places = build.lshr(build.xor(bits, flips), function.emit.whole(16))
        for at in range(function.width):
            self._add_to(build.extract_element(places, INT32(at)))
        build.branch(behind)
        together = build.block
        build.position_at_end(one_by_one)
        (found,) = function.emit.repeat(first, build.add(first, INT64(function.width)), 1, self._one, [num_others])
        one_by_one = build.block
        build.branch(behind)
        build.position_at_end(behind)
        number = build.phi(INT64)
        number.add_incoming(num_others, together)
        number.add_incoming(found, one_by_one)
        return (number,)

    def _one(self, column: Value, num_others: Value) -> Sequence[Value]:
        """No branches: what is not wanted is written where nobody reads it, or written over."""
        function, build = self._function, self._function.build
        number = build.fadd(function.emit.number(self._row, column), FLOAT(0.0))  # no -0.0
        bits = build.bitcast(number, INT32)
        is_short = build.icmp_signed("==", build.and_(bits, INT32(NUM_BINS - 1)), INT32(0))
        flips = build.or_(build.ashr(bits, INT32(31)), INT32(1 << 31))
        self._add_to(build.select(is_short, build.lshr(build.xor(bits, flips), INT32(16)), INT32(NUM_BINS)))
        place = function.emit.least(num_others, INT64(MOST_OTHERS - 1))
        build.store(build.trunc(column, INT32), function.emit.at(self._others, place, INT32))
        return (build.add(num_others, build.zext(build.not_(is_short), INT64)),)

    def _add_to(self, place: Value) -> None:
        build = self._function.build
        tallied = self._function.emit.at(self._tallies, build.zext(place, INT64), INT32)
        build.store(build.add(build.load(tallied, typ=INT32), INT32(1)), tallied)


def _count(function: _Function, item: Value) -> None:
    build, emit = function.build, function.emit
    tally, tallies = _Tally(function, item), function.part("tallies", item, NUM_TALLIES, INT32)
    values, numbers = (function.part(name, item, MOST_VALUES, INT32) for name in ("values", "numbers"))
    found = function.part("found", item, 2, INT32)

    def tell(step: Value, num_values: Value) -> Sequence[Value]:
        place = build.sub(INT64(NUM_BINS - 1), step)
        number = build.load(emit.at(tallies, place, INT32), typ=INT32)
        short = build.trunc(place, INT32)
        is_negative = build.icmp_signed("<", short, INT32(SIGN))
        bits = build.xor(short, build.select(is_negative, INT32(NUM_BINS - 1), INT32(SIGN)))
        at = function.emit.least(num_values, INT64(MOST_VALUES - 1))
        build.store(build.shl(bits, INT32(16)), emit.at(values, at, INT32))
        build.store(number, emit.at(numbers, at, INT32))
        return (build.add(num_values, build.zext(build.icmp_signed("!=", number, INT32(0)), INT64)),)

    tally.begin()
    num_others = tally.all()
    (num_values,) = emit.repeat(INT64(0), INT64(NUM_BINS), 1, tell, [INT64(0)])
    build.store(build.trunc(num_values, INT32), emit.at(found, 0, INT32))
    build.store(build.trunc(num_others, INT32), emit.at(found, 1, INT32))


BODIES: Mapping[str, Body] = {WEIGH: _weigh, LIST: _list, COUNT: _count}


ROWS_AT_ONCE = 8
"""Of which the tallies lie in memory, 256 KiB each."""
SHORT = 1 << 15
"""Logits that one thread weighs in the time that it takes to wake another."""
TOLERANCE = 1e-5


class VocabularyKernels:
    """For rows of float32 in the host's memory."""

    def __init__(self) -> None:
        """Raises RuntimeError where LLVM makes none."""
        code = Code(emit(Machine.here().width))
        self._weigh, self._list, self._count = (Kernel(code, name) for name in (WEIGH, LIST, COUNT))

    @staticmethod
    def takes(logits: Tensor) -> bool:
        """Whether these rows can be read."""
        is_here = logits.device.type == "cpu" and logits.dtype == torch.float32
        return is_here and logits.dim() == 2 and logits.stride(1) == 1

    def weigh(
        self, logits: Tensor, rows: Sequence[int], highest: Tensor, divisors: Tensor, bounds: Tensor, ends: Tensor
    ) -> Tensor:
        """The sums of exp((logit - highest) / divisor) over 64 columns each of what is in play, to seven digits.

        logits: [any rows, vocab], none of what is in play above highest [n];  divisors: [n]
        bounds, ends: as `bounds_of` gives them
        Returns [n, blocks] float64, of these rows.
        """
        num_sums = -(-logits.shape[1] // BLOCK)
        sums = torch.empty(len(rows), num_sums)
        given = (*(each.contiguous() for each in (bounds, ends, highest.float(), divisors.float())), sums)
        self._run(self._weigh, logits, rows, *(each.data_ptr() for each in given), num_sums)
        return sums.double()

    def ids(self, row: Tensor, in_play: InPlay, count: int, *, first: int = 0) -> Tensor:
        """Ids of tokens that are in play, by rising id, so many from the first on. row: [vocab];  -> [count] int64"""
        bounds, ends = bounds_of([in_play])
        found = torch.empty(count + 1, dtype=torch.int32)
        self._run(self._list, row[None], [0], bounds.data_ptr(), ends.data_ptr(), first, count, found.data_ptr())
        return found[:count].long()

    def count(self, logits: Tensor, rows: Sequence[int]) -> list[Counted | None]:
        """The values that rows have; None for a row of too many. Of minus infinity nothing is told."""
        found: list[Counted | None] = []
        for first in range(0, len(rows), ROWS_AT_ONCE):
            found += self._count_some(logits, rows[first : first + ROWS_AT_ONCE])
        return found

    def _count_some(self, logits: Tensor, rows: Sequence[int]) -> list[Counted | None]:
        size = len(rows)
        tallies = torch.empty(size, NUM_TALLIES, dtype=torch.int32)
        values = torch.empty(size, MOST_VALUES)
        numbers = torch.empty(size, MOST_VALUES, dtype=torch.int32)
        others = torch.empty(size, MOST_OTHERS, dtype=torch.int32)
        found = torch.empty(size, 2, dtype=torch.int32)
        made = (tallies, values, numbers, others, found)
        self._run(self._count, logits, rows, 0, *(each.data_ptr() for each in made))
        counted: list[Counted | None] = []
        for at, (num_values, num_others) in enumerate(found.tolist()):
            if num_values >= MOST_VALUES or num_others >= MOST_OTHERS:
                counted.append(None)
                continue
            num_values -= num_values > 0 and float(values[at, num_values - 1]) == -inf
            own = values[at, :num_values], numbers[at, :num_values].long()
            counted.append(Counted(*own, others[at, :num_others].long()))
        return counted

    def _run(self, kernel: Kernel, logits: Tensor, rows: Sequence[int], *parameters: int) -> None:
        numbers = torch.tensor(rows)
        vocab, size = logits.shape[1], len(rows)
        given = (size, logits.data_ptr(), logits.stride(0), numbers.data_ptr(), vocab)
        kernel(*given, *parameters, is_short=size == 1 or size * vocab <= SHORT)


@functools.cache
def vocabulary_kernels() -> VocabularyKernels | None:
    """Return the kernels; None where this machine has none."""
    return tried("passes over vocabularies", VocabularyKernels, _are_right)


def _are_right(kernels: VocabularyKernels) -> bool:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    logits[1, 7], logits[1, 9], highest = 0.1, -inf, logits.amax(-1)
    sums = kernels.weigh(logits, [2, 1], highest[[2, 1]], torch.tensor([1.0, 0.5]), *bounds_of([ALL, ALL]))
    expected = torch.exp((logits[[2, 1]] - highest[[2, 1], None]) / torch.tensor([[1.0], [0.5]])).double()
    if not torch.allclose(sums.sum(-1), expected.sum(-1), rtol=TOLERANCE):
        return False
    in_play = InPlay(lowest=0.1, lowest_ids=(0, 7), highest=1.0)
    inside = torch.nonzero((logits[1] > 0.1) & (logits[1] <= 1.0) | (torch.arange(200) == 7))[:, 0]
    if not torch.equal(kernels.ids(logits[1], in_play, len(inside) - 1, first=1), inside[1:]):
        return False
    (counted,) = kernels.count(logits, [1])
    finite = logits[1][logits[1].isfinite()]
    values, numbers = torch.unique(finite[finite != logits[1, 7]], return_counts=True)
    if counted is None or counted.others.tolist() != [7]:
        return False
    return torch.equal(counted.values, values.flip(0)) and torch.equal(counted.numbers, numbers.flip(0))
