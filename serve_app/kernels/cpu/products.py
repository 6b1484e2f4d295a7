"""Multiplies rows by a weight in blocks of 64 outputs, in bfloat16 or int8.

A block is multiplied by all rows before the next one is read, which is fetched meanwhile; so a step of some sequences
takes as long as reading the weights, or as multiplying by them, and not both. What is added up for a row is added in
the order of the inputs, whatever other rows there are: a row gets the same bits in any company.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from llvmlite import ir
from torch import Tensor

from serve_app.kernels.cpu.compiling import KINDS, Kernel, address, tried
from serve_app.kernels.cpu.emitter import FLOAT, INT32, INT64, Emitter, Kind, Value, multiplied_by_word
from serve_app.kernels.torch_private import memory_of, multiply

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


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


WORDS = ir.VectorType(INT32, WIDTH)
QUADS = ir.VectorType(ir.IntType(8), 4 * WIDTH)
PAIRS = ir.VectorType(_BFloat(), 2 * WIDTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Sums that are in registers. vectors: of each row;  lines: that are fetched ahead with each group"""

    rows: int
    vectors: int
    lines: int


class Writer:
    """Writes the function, for CPUs with AVX512-BF16, or AVX512-VNNI.

    first: of the rows that a block is multiplied by;  begin: of the groups of a chunk
    """

    def __init__(self, output: Kind, *, is_whole: bool) -> None:
        """output: kind of the results;  is_whole: inputs of 0 … 255 and weights of -128 … 127, else both bfloat16"""
        self._is_whole = is_whole
        self._emit = Emitter(NAME, PARAMETERS, width=WIDTH, kind=output)
        self._build, self._of = self._emit.builder, self._emit.of
        self._sums = self._emit.local(ROWS * BLOCK)
        self._block: Value = None
        self._first: Value = None
        self._rows: Value = None
        self._begin: Value = None
        self._groups: Value = None
        self._weights: Value = None
        self._next: Value = None

    def write(self) -> Any:
        """Return the module of LLVM's with the function `NAME`."""
        whole, parts = self._of["num_whole"], self._of["num_parts"]
        divided = self._build.mul(self._build.sub(self._of["num_blocks"], whole), parts)
        return self._emit.take_items(self._build.add(whole, divided), self._multiply)

    def _multiply(self, item: Value) -> None:
        build, whole, parts = self._build, self._of["num_whole"], self._of["num_parts"]
        behind = build.sub(item, whole)
        is_whole = build.icmp_signed("<", behind, INT64(0))
        self._block = build.select(is_whole, item, build.add(whole, build.sdiv(behind, parts)))
        begin = build.select(is_whole, INT64(0), build.mul(build.srem(behind, parts), INT64(ROWS)))
        end = build.select(is_whole, self._of["num_rows"], build.add(begin, INT64(ROWS)))
        self._emit.repeat(begin, self._emit.least(end, self._of["num_rows"]), ROWS, self._multiply_block)

    def _multiply_block(self, first: Value) -> None:
        self._first = first
        self._rows = self._emit.least(self._build.sub(self._of["num_rows"], first), INT64(ROWS))
        self._emit.repeat(INT64(0), self._of["num_groups"], CHUNK, self._multiply_chunk)
        self._emit.repeat(INT64(0), self._rows, 1, self._give)

    def _multiply_chunk(self, begin: Value) -> None:
        """The rows' sums over some groups of inputs, from a first one on."""
        build, emit = self._build, self._emit
        left = build.sub(self._of["num_groups"], begin)
        groups = self._emit.least(left, INT64(CHUNK))
        size = build.mul(self._of["num_groups"], INT64(BLOCK))
        start = build.add(build.mul(self._block, size), build.mul(begin, INT64(BLOCK)))
        self._weights = emit.at(emit.address("weight"), start, INT32)
        behind = emit.at(self._weights, build.mul(groups, INT64(BLOCK)), INT32)
        ahead = build.mul(build.add(self._block, self._of["num_threads"]), size)
        is_last = build.icmp_signed("<=", left, INT64(CHUNK))
        self._next = build.select(is_last, emit.at(emit.address("weight"), ahead, INT32), behind)
        self._begin, self._groups = begin, groups
        are_few = build.icmp_signed("<=", self._rows, INT64(FEW))
        with build.if_else(are_few) as (few, many):
            with few:
                for rows, may_be in self._each(self._rows, 1, FEW):
                    with may_be:
                        self._tile(Tile(rows=rows, vectors=VECTORS, lines=VECTORS), INT64(0), INT64(0), INT64(0))
            with many:
                emit.repeat(INT64(0), INT64(BLOCK // PART), 1, self._multiply_part)

    def _multiply_part(self, part: Value) -> None:
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

                def multiply(number: Value) -> None:
                    at_row = build.mul(number, size)
                    found = emit.least(size, build.sub(self._rows, at_row))
                    for rows, may_be in self._each(found, 1, MOST):
                        with may_be:
                            tile = Tile(rows=rows, vectors=vectors, lines=1)
                            self._tile(tile, at_row, part, build.add(build.mul(part, count), number))

                emit.repeat(INT64(0), count, 1, multiply)

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
            emit.at(emit.address("x"), build.add(start, build.mul(self._of["x_stride"], INT64(row))), INT32)
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
                    emit.fetch(emit.at(place, line * LINE, INT32))
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
        return WORDS if self._is_whole else self._emit.vector

    def _read(self, sums: Value, place: int) -> Value:
        return self._build.load(self._emit.at(sums, place, FLOAT), typ=self._sum, align=4)

    def _group(self, weights: Value, group: Value, inputs: Sequence[Value], totals: Sequence[Value]) -> list[Value]:
        build, emit, count = self._build, self._emit, len(totals) // len(inputs)
        kind = QUADS if self._is_whole else PAIRS
        weights = emit.at(weights, build.mul(group, INT64(BLOCK)), INT32)
        vectors = [build.load(emit.at(weights, at * WIDTH, INT32), typ=kind, align=2) for at in range(count)]
        found: list[Value] = []
        for row, base in enumerate(inputs):
            own, word = totals[row * count : (row + 1) * count], emit.at(base, group, INT32)
            if len(inputs) <= FEW:
                found += self._row_by_llvm(word, own, vectors)
            else:  # LLVM would load the words of many rows first, and sums would leave registers
                name = "vpdpbusd" if self._is_whole else "vdpbf16ps"
                found += multiplied_by_word(emit, name, word, own, vectors)
        return found

    def _row_by_llvm(self, word: Value, totals: Sequence[Value], vectors: Sequence[Value]) -> list[Value]:
        """A row's sums with one more group, whose word is at that address."""
        build, nothing = self._build, ir.Constant(WORDS, ir.Undefined)
        name = "llvm.x86.avx512.vpdpbusd.512" if self._is_whole else "llvm.x86.avx512bf16.dpbf16ps.512"
        single = build.insert_element(nothing, build.load(word, typ=INT32, align=2), INT32(0))
        x = build.bitcast(build.shuffle_vector(single, nothing, self._emit.whole(0)), vectors[0].type)
        return [
            self._emit.call(name, self._sum, total, x, vector) for total, vector in zip(totals, vectors, strict=True)
        ]

    def _give(self, at_row: Value) -> None:
        """Write a row's outputs of the block, those that there are."""
        build, emit = self._build, self._emit
        first, row = build.mul(self._block, INT64(BLOCK)), build.add(self._first, at_row)
        sums = emit.at(self._sums, build.mul(at_row, INT64(BLOCK)), FLOAT)
        output = emit.at(emit.address("output"), build.add(build.mul(row, self._of["num_outputs"]), first))
        has_bias = build.icmp_signed("!=", self._of["bias"], INT64(0))
        for at in range(0, BLOCK, WIDTH):
            place = build.add(first, INT64(at))
            exists = build.icmp_signed("<", place, self._of["num_outputs"])
            with build.if_then(exists):
                found = self._scaled(sums, at, place, row) if self._is_whole else emit.floats(sums, at)
                emit.put(found, sums, at)
            with build.if_then(build.and_(exists, has_bias)):
                emit.put(build.fadd(emit.floats(sums, at), emit.floats(emit.address("bias"), place)), sums, at)
            with build.if_then(exists):
                emit.write(emit.floats(sums, at), output, at)

    def _scaled(self, sums: Value, at: int, place: Value, row: Value) -> Value:
        build, emit = self._build, self._emit
        offsets = build.load(emit.at(emit.address("offsets"), place, INT32), typ=WORDS, align=4)
        exact = build.sitofp(build.sub(self._read(sums, at), offsets), emit.vector)
        scale = emit.spread(emit.number(emit.address("scales"), row))
        return build.fmul(build.fmul(exact, scale), emit.floats(emit.address("factors"), place))


MAX_ROWS = 1024
"""Beyond so many nothing was compared. With two cores and 20 GB/s this takes, of oneDNN's time, 0.67 for one row, 0.78
for 8, 0.7 for 16, 0.8 to 1 for 32, 0.95 for 60 and for 512 (the linears of Qwen2.5-0.5B)."""
SHORT = 1 << 18
"""Products of pairs, or of fours, of numbers that one thread computes alone. With twice as many, a step of one sequence
takes 1.05 of the time where the other threads are awake, and the same where they sleep (Qwen2.5-0.5B)."""
TRIED_ROWS = (1, 7, 20)
MIDDLE = 128
"""What inputs are moved up by, as the instruction takes those without a sign."""
TOLERANCE = 0.02
"""Of a weight's largest output, by which the kernel may differ from oneDNN's: both round to bfloat16."""


class LaidOut:
    """One weight's products, read where oneDNN has it."""

    def __init__(self, kernel: Kernel, packed: Tensor, bias: Tensor | None, *, begin: int) -> None:
        """packed: [outputs, inputs], which has to be laid out as the kernel reads it, from `begin`;  bias: [outputs]"""
        self._kernel = kernel
        self._packed = packed
        self._bias = None if bias is None else bias.detach().float()
        self.num_outputs, self._inputs = packed.shape
        self._num_blocks = -(-self.num_outputs // BLOCK)
        self._begin = begin

    @classmethod
    def find(cls, packed: Tensor, bias: Tensor | None) -> LaidOut | None:
        """Return it for a weight that oneDNN has laid out; None where no kernel reads it so, as a trial shows."""
        kernel = _kernel() if packed.dtype == torch.bfloat16 else None
        memory = memory_of(packed) if kernel is not None else None
        if kernel is None or memory is None or not _may_be_read(packed, memory.num_bytes):
            return None
        found = cls(kernel, packed, bias, begin=memory.address)
        return found if found._is_right() else None

    @staticmethod
    def may_read(shape: torch.Size, dtype: torch.dtype) -> bool:
        """Return whether there is a kernel for a weight [outputs, inputs], if oneDNN lays it out as it does."""
        return dtype == torch.bfloat16 and _has_sizes(*shape) and _kernel() is not None

    def takes(self, x: Tensor) -> bool:
        """Return whether x [..., inputs] can be multiplied."""
        has_form = x.dim() == 2 and 0 < len(x) <= MAX_ROWS and x.dtype == torch.bfloat16
        return has_form and x.shape[1] == self._inputs and x.stride(1) == 1 and x.stride(0) % 2 == 0

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [rows, inputs], which it `takes`. Returns [rows, outputs]."""
        num_rows = len(x)
        output = torch.empty(num_rows, self.num_outputs, dtype=torch.bfloat16)
        _run(
            self._kernel, (
                self._num_blocks, x.data_ptr(), x.stride(0) // 2, self._begin, output.data_ptr(), self.num_outputs,
                address(self._bias), num_rows, self._inputs // 2,
            ),
        )  # fmt: skip
        return output

    @torch.inference_mode()
    def _is_right(self) -> bool:
        draw = torch.Generator().manual_seed(0)
        bias = None if self._bias is None else self._bias.bfloat16()
        for rows in TRIED_ROWS:
            x = torch.randn(rows, self._inputs, generator=draw).bfloat16()
            theirs = multiply(x, self._packed, bias).float()
            limit = TOLERANCE * float(theirs.abs().max())
            if not torch.allclose(self(x).float(), theirs, rtol=0, atol=limit):
                return False
        return True


def _may_be_read(packed: Tensor, num_bytes: int) -> bool:
    """Return whether the memory has the size of whole blocks, and the weight sizes that the kernel divides."""
    outputs, inputs = packed.shape
    size = -(-outputs // BLOCK) * BLOCK * inputs * packed.element_size()
    return num_bytes == size and _has_sizes(outputs, inputs)


def _has_sizes(outputs: int, inputs: int) -> bool:
    return outputs % WIDTH == 0 and inputs % (2 * UNROLLED) == 0


class WholeRows:
    """A weight in int8, and its products with rows of inputs that are rounded to eight bits.

    middle: what inputs are moved up by
    """

    middle = MIDDLE

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        """numbers: [outputs, inputs] int8;  scales: [outputs] float32"""
        self.outputs, self.inputs = numbers.shape
        padded = F.pad(numbers, (0, -self.inputs % (4 * UNROLLED), 0, -self.outputs % BLOCK))
        groups = padded.shape[1] // 4
        self._packed = padded.view(-1, BLOCK, groups, 4).transpose(1, 2).contiguous()
        self._factors = F.pad(scales.float(), (0, len(padded) - self.outputs))
        self._offsets = (padded.sum(1, dtype=torch.int32) * MIDDLE).contiguous()
        self._stride = -(-self.outputs // WIDTH) * WIDTH
        self.num_inputs = padded.shape[1]

    @classmethod
    def find(cls, numbers: Tensor, scales: Tensor) -> WholeRows | None:
        """Return it for such a weight; None where this machine has no kernel."""
        return None if whole_kernel(torch.float32) is None else cls(numbers, scales)

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """The numbers and scales that it was made of, copies."""
        whole = self._packed.transpose(1, 2).reshape(-1, self.num_inputs)
        return whole[: self.outputs, : self.inputs].contiguous(), self._factors[: self.outputs].clone()

    def __call__(self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Multiply x [rows, num_inputs] uint8, each 128 above what is meant. Returns [rows, outputs].

        scales: [rows, 1] and bias: [outputs], float32
        """
        kernel = whole_kernel(dtype)
        assert kernel is not None, "it was there in float32"
        output = torch.empty(len(x), self._stride, dtype=dtype)
        has_form = bias is None or (self._stride == self.outputs and bias.is_contiguous())
        padded = bias if bias is None or has_form else F.pad(bias, (0, self._stride - self.outputs)).contiguous()
        blocks, groups, *_ = self._packed.shape
        _run(
            kernel, (
                blocks, x.data_ptr(), self.num_inputs // 4, self._packed.data_ptr(), output.data_ptr(), self._stride,
                address(padded), len(x), groups,
            ), (scales.data_ptr(), self._factors.data_ptr(), self._offsets.data_ptr()),
        )  # fmt: skip
        return output if self._stride == self.outputs else output[:, : self.outputs].contiguous()


def _run(kernel: Kernel, parameters: Sequence[int], whole: Sequence[int] = (0, 0, 0)) -> None:
    """Multiply. parameters: from the number of blocks to that of groups;  whole: those of whole numbers"""
    num_blocks, num_rows, num_groups = parameters[0], *parameters[-2:]
    is_short = num_blocks * BLOCK * num_groups * num_rows <= SHORT
    num_threads = 1 if is_short else torch.get_num_threads()
    # what makes no round of blocks, and the last round, is divided, so that all threads end together
    num_whole, num_parts = max(0, num_blocks // num_threads - 1) * num_threads, -(-num_rows // ROWS)
    kernel(*parameters, num_threads, *whole, num_whole, num_parts, is_short=is_short)


@functools.cache
def _kernel() -> Kernel | None:
    """Return the kernel in bfloat16; None where this CPU, or this machine, has none."""
    return _made_for("bfloat16", is_whole=False) if torch.cpu.get_capabilities().get("avx512_bf16") else None


@functools.cache
def whole_kernel(dtype: torch.dtype) -> Kernel | None:
    """Return the kernel of whole numbers with results of that type; None where there is none."""
    has_instructions = bool(torch.cpu.get_capabilities().get("avx512_vnni"))
    return _made_for(KINDS[dtype], is_whole=True) if has_instructions and dtype in KINDS else None


def _made_for(output: Kind, *, is_whole: bool) -> Kernel | None:
    """On CPUs with AMX oneDNN multiplies by that: own products would save 5 % of a step, and cost more of a prompt."""
    if torch.cpu.get_capabilities().get("amx_tile"):
        return None
    what = "products of whole numbers" if is_whole else "products of bfloat16"
    return tried(
        what, lambda: Kernel(Writer(output, is_whole=is_whole).write(), NAME), lambda _: True
    )  # each weight's are tried
