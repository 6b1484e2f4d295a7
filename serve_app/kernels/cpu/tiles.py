"""Attention of prompts over keys and values in pages, in one pass over both (arXiv 2205.14135).

A tile is some queries of one sequence and all their heads that share a key head. Each of them has a place of its own in
vectors, and keys and values are read one number after the other for all of them. So what a query gets depends on its
own keys alone, to its last bit, whatever is computed beside it. Blocks of keys begin at multiples of 64.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from serve_app.kernels.cpu.attention import BLOCK, LEAST, Form
from serve_app.kernels.cpu.compiling import Kernel, tried
from serve_app.kernels.cpu.emitter import FLOAT, INT32, INT64, Emitter, Value
from serve_app.kernels.cpu.rows import Trial, attend
from serve_app.kernels.forms import Stretch

logger = logging.getLogger(__name__)

TOGETHER = 4
"""Keys, or numbers of values, that are multiplied by what is in registers."""
TRIED = range(257, 385)
"""Keys of the queries of a trial: a prompt behind twice as many tokens."""
TRIES = 5
MUCH = 1.3
"""So many times as fast torch has to be to be chosen: a smaller difference may be another process's work."""
PARAMETERS = (
    "counter", "num_items", "num_heads", "query", "query_stride", "output", "keys", "values", "slots", "stride",
    "scale", "items", "bounds",
)  # fmt: skip
"""Each int64. num_heads: of keys;  stride: numbers from one slot to the next
scale: bits of a float32, log2(e) in it;  bounds: of each token the first key that it sees, and one behind the last
"""
COLUMNS = ("token", "count", "position", "begin", "end")
"""Of an item, int64 each. position: among the slots, of the sequence's first key;  begin, end: keys that are seen"""
NAME = "attend_tiles"


class TileForm(Form):
    """Heads for which a kernel is compiled, and how many queries a tile has."""

    @property
    def query_vectors(self) -> int:
        """Vectors in which each query has a place. The sums that they are multiplied to fill half the CPU's."""
        return self.registers // 8

    @property
    def places(self) -> int:
        return self.query_vectors * self.width

    @property
    def num_tokens(self) -> int:
        """How many tokens of a sequence a tile has: each takes a place for each of its heads."""
        return self.places // self.group


class Writer:
    """Writes the function that attends for one tile after the other."""

    def __init__(self, form: TileForm) -> None:
        self._form = form
        self._emit = emitter = Emitter(NAME, PARAMETERS, width=form.width, kind=form.kind)
        self._build, self._of = emitter.builder, emitter.of
        self._scale = emitter.spread(self._build.bitcast(self._build.trunc(self._of["scale"], INT32), FLOAT))
        self._queries, self._sums = (emitter.local(form.dim * form.places) for _ in range(2))  # [dim, places]
        self._scores = emitter.local(BLOCK * form.places)  # [keys, places]
        self._read = emitter.local(BLOCK * form.dim)  # keys or values, [keys, dim]
        self._tops, self._totals, self._shrunk = (emitter.local(form.places) for _ in range(3))
        self._firsts, self._ends = (emitter.local(form.places) for _ in range(2))  # of keys, as float32
        self._item: dict[str, Value] = {}
        self._head: Value = None

    def write(self) -> Any:
        """Return the module of LLVM's with the function `NAME` of the parameters' address."""
        return self._emit.take_items(self._build.mul(self._of["num_items"], self._of["num_heads"]), self._attend)

    def _attend(self, number: Value) -> None:
        build, emitter = self._build, self._emit
        self._head = build.srem(number, self._of["num_heads"])
        self._item = emitter.row("items", build.sdiv(number, self._of["num_heads"]), COLUMNS)
        for at in range(0, self._form.places, self._form.width):
            self._begin(at)
        emitter.repeat(self._item["begin"], self._item["end"], BLOCK, self._block)
        for at in range(0, self._form.places, self._form.width):
            self._finish(at)

    def _token(self, place: int) -> Value:
        """Whose query has a place; behind the last one it is computed again, and written once more."""
        last = self._build.sub(self._item["count"], INT64(1))
        return self._build.add(self._item["token"], self._emit.least(INT64(place // self._form.group), last))

    def _heads_of(self, name: str, stride: Value, at: int) -> list[Value]:
        """Where the heads of a vector's places begin, in queries or results."""
        build, form = self._build, self._form
        found = []
        for place in range(at, at + form.width):
            head = build.add(build.mul(self._head, INT64(form.group)), INT64(place % form.group))
            start = build.add(build.mul(self._token(place), stride), build.mul(head, INT64(form.dim)))
            found.append(self._emit.at(self._emit.address(name), start))
        return found

    def _begin(self, at: int) -> None:
        """Read the queries of a vector's places, and which keys they see."""
        build, emitter, form = self._build, self._emit, self._form
        heads = self._heads_of("query", self._of["query_stride"], at)

        def read(first: Value) -> None:
            vectors = [build.fmul(emitter.read(head, first), self._scale) for head in heads]
            for number, vector in enumerate(emitter.transposed(vectors)):
                place = build.add(build.mul(build.add(first, INT64(number)), INT64(form.places)), INT64(at))
                emitter.put(vector, self._queries, place)
                emitter.put(emitter.all_of(0.0), self._sums, place)

        emitter.repeat(INT64(0), INT64(form.dim), form.width, read)
        for place in range(at, at + form.width):
            own = build.mul(self._token(place), INT64(2))
            for which, target in enumerate((self._firsts, self._ends)):
                bound = emitter.number(emitter.address("bounds"), build.add(own, INT64(which)), INT64)
                emitter.put(build.sitofp(bound, FLOAT), target, place)
        emitter.put(emitter.all_of(LEAST), self._tops, at)
        emitter.put(emitter.all_of(0.0), self._totals, at)

    def _block(self, begin: Value) -> None:
        form, emitter = self._form, self._emit
        self._widen("keys", begin)
        emitter.repeat(INT64(0), INT64(BLOCK), TOGETHER, self._score)
        self._hide(begin)
        self._weigh()
        self._widen("values", begin)
        emitter.repeat(INT64(0), INT64(form.dim), TOGETHER, self._add)

    def _widen(self, name: str, begin: Value) -> None:
        """Make a block's keys, or its values, float32 once for all queries; behind the last one it is read again."""
        build, emitter, form = self._build, self._emit, self._form
        base = emitter.at(emitter.address(name), build.mul(self._head, INT64(form.dim)))
        last = build.sub(self._item["end"], INT64(1))

        def widen(key: Value) -> None:
            position = build.add(self._item["position"], emitter.least(build.add(begin, key), last))
            slot = emitter.number(emitter.address("slots"), position, INT64)
            source = emitter.at(base, build.mul(slot, self._of["stride"]))
            for at in range(0, form.dim, form.width):
                target = build.add(build.mul(key, INT64(form.dim)), INT64(at))
                emitter.put(emitter.read(source, at), self._read, target)

        emitter.repeat(INT64(0), INT64(BLOCK), 1, widen)

    def _vectors(self, base: Value, row: Value) -> list[Value]:
        """Return a row, a number of each query."""
        start = self._build.mul(row, INT64(self._form.places))
        width = self._form.width
        return [
            self._emit.floats(base, self._build.add(start, INT64(number * width)))
            for number in range(self._form.query_vectors)
        ]

    def _put(self, vectors: Sequence[Value], base: Value, row: Value) -> None:
        start = self._build.mul(row, INT64(self._form.places))
        for number, vector in enumerate(vectors):
            self._emit.put(vector, base, self._build.add(start, INT64(number * self._form.width)))

    def _score(self, first: Value) -> None:
        """The products of some keys with all queries."""
        build, size = self._build, INT64(self._form.dim)
        nothing = [self._emit.all_of(0.0)] * (TOGETHER * self._form.query_vectors)
        place = lambda key, at: build.add(build.mul(key, size), at)  # noqa: E731
        self._multiply(self._queries, self._form.dim, place, self._scores, self._rows(first), nothing)

    def _add(self, first: Value) -> None:
        """Some numbers of all values, by their weights, to all sums."""
        build, size = self._build, INT64(self._form.dim)
        rows, shrunk = self._rows(first), self._vectors(self._shrunk, INT64(0))
        before = [
            build.fmul(*pair) for row in rows for pair in zip(self._vectors(self._sums, row), shrunk, strict=True)
        ]
        place = lambda number, key: build.add(build.mul(key, size), number)  # noqa: E731
        self._multiply(self._scores, BLOCK, place, self._sums, rows, before)

    def _rows(self, first: Value) -> list[Value]:
        return [self._build.add(first, INT64(number)) for number in range(TOGETHER)]

    def _multiply(
        self,
        base: Value,
        count: int,
        place: Callable[[Value, Value], Value],
        target: Value,
        rows: Sequence[Value],
        before: Sequence[Value],
    ) -> None:
        """Write some rows of sums to the target: of the first rows from `base` on, each by a number that was read.

        place: of a row of sums and one that is summed, where that number is;  before: sums to begin with
        """
        emitter, size = self._emit, self._form.query_vectors

        def multiply(at: Value, *sums: Value) -> Sequence[Value]:
            vectors, found = self._vectors(base, at), []
            for number, row in enumerate(rows):
                factor = emitter.spread(emitter.number(self._read, place(row, at)))
                mine = sums[number * size : (number + 1) * size]
                found += [emitter.fused(factor, *pair) for pair in zip(vectors, mine, strict=True)]
            return found

        sums = emitter.repeat(INT64(0), INT64(count), 1, multiply, before)
        for number, row in enumerate(rows):
            self._put(sums[number * size : (number + 1) * size], target, row)

    def _hide(self, begin: Value) -> None:
        """Give keys that a query does not see the least score."""
        build, emitter, form = self._build, self._emit, self._form
        firsts, ends = (self._vectors(base, INT64(0)) for base in (self._firsts, self._ends))

        def hide(key: Value) -> None:
            number = emitter.spread(build.sitofp(build.add(begin, key), FLOAT))
            seen = []
            for score, first, end in zip(self._vectors(self._scores, key), firsts, ends, strict=True):
                is_seen = build.and_(build.fcmp_ordered(">=", number, first), build.fcmp_ordered("<", number, end))
                seen.append(build.select(is_seen, score, emitter.all_of(LEAST)))
            self._put(seen, self._scores, key)

        last = build.sitofp(build.add(begin, INT64(BLOCK - 1)), FLOAT)
        start = build.sitofp(begin, FLOAT)
        sees_all: Value = ir.Constant(ir.IntType(1), 1)
        for first, end in zip(firsts, ends, strict=True):
            least = emitter.call(f"llvm.vector.reduce.fmin.v{form.width}f32", FLOAT, end)
            sees_all = build.and_(sees_all, build.fcmp_ordered("<", last, least))
            sees_all = build.and_(sees_all, build.fcmp_ordered(">=", start, emitter.largest(first)))
        with build.if_then(build.not_(sees_all)):
            emitter.repeat(INT64(0), INT64(BLOCK), 1, hide)

    def _weigh(self) -> None:
        """Scores to weights, which are added up; what was summed before is to shrink."""
        build, emitter = self._build, self._emit

        def find(key: Value, *tops: Value) -> Sequence[Value]:
            return [emitter.larger(*pair) for pair in zip(tops, self._vectors(self._scores, key), strict=True)]

        def weigh(key: Value, *totals: Value) -> Sequence[Value]:
            scores = zip(self._vectors(self._scores, key), tops, strict=True)
            weights = [emitter.power_of_two(build.fsub(score, top)) for score, top in scores]
            self._put(weights, self._scores, key)
            return [build.fadd(*pair) for pair in zip(totals, weights, strict=True)]

        before = self._vectors(self._tops, INT64(0))
        tops = emitter.repeat(INT64(0), INT64(BLOCK), 1, find, before)
        shrunk = [emitter.power_of_two(build.fsub(*pair)) for pair in zip(before, tops, strict=True)]
        totals = [build.fmul(*pair) for pair in zip(self._vectors(self._totals, INT64(0)), shrunk, strict=True)]
        self._put(emitter.repeat(INT64(0), INT64(BLOCK), 1, weigh, totals), self._totals, INT64(0))
        self._put(tops, self._tops, INT64(0))
        self._put(shrunk, self._shrunk, INT64(0))

    def _finish(self, at: int) -> None:
        """Write the results of a vector's places."""
        build, emitter, form = self._build, self._emit, self._form
        width = build.mul(self._of["num_heads"], INT64(form.group * form.dim))
        heads = self._heads_of("output", width, at)
        share = build.fdiv(emitter.all_of(1.0), emitter.floats(self._totals, at))

        def write(first: Value) -> None:
            rows = [build.mul(build.add(first, INT64(number)), INT64(form.places)) for number in range(form.width)]
            sums = [build.fmul(emitter.floats(self._sums, build.add(row, INT64(at))), share) for row in rows]
            for head, vector in zip(heads, emitter.transposed(sums), strict=True):
                emitter.write(vector, head, first)

        emitter.repeat(INT64(0), INT64(form.dim), form.width, write)


class Tiles:
    """The prompts of a step, as the kernel reads them; one layer after the other."""

    def __init__(self, stretches: Sequence[Stretch], num_tokens: int) -> None:
        """num_tokens: of a tile"""
        items, last = [], max(each.token + len(each.bounds) for each in stretches)
        self.bounds = torch.zeros(last, 2, dtype=torch.int64)
        for each in stretches:
            self.bounds[each.token : each.token + len(each.bounds)] = torch.tensor(each.bounds)
            for at in range(0, len(each.bounds), num_tokens):
                seen = each.bounds[at : at + num_tokens]  # neither bound is ever below the one before
                begin = seen[0][0] // BLOCK * BLOCK
                items.append((each.token + at, len(seen), each.position, begin, seen[-1][1]))
        items.sort(key=lambda item: item[3] - item[4])  # the longest first, so that threads end together
        self.items = torch.tensor(items, dtype=torch.int64)


class TilesKernel:
    """Attends for prompts, with heads of one form."""

    def __init__(self, form: TileForm) -> None:
        """Raises RuntimeError where LLVM makes no kernel."""
        self._kernel = Kernel(Writer(form).write(), NAME)
        self._num_tokens = form.num_tokens

    def lay(self, stretches: Sequence[Stretch]) -> list[Tiles]:
        """Return what is run for these, one after the other."""
        return [Tiles(stretches, self._num_tokens)]

    def run(
        self, query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, tiles: Tiles, output: Tensor, *, scale: float
    ) -> None:
        """As `RowsKernel.run`."""
        given = tiles.items, tiles.bounds.data_ptr()
        attend(self._kernel, query, keys, values, slots, output, *given, scale=scale, is_short=False)


@functools.cache
def tiles_kernel(group: int, dim: int, dtype: torch.dtype) -> TilesKernel | None:
    """Return the kernel for heads of that size, `group` of which share a key head; None if there is none.

    It is tried beside torch before it is used. With AMX, where it was never measured, torch is asked how long it takes.
    """
    form = TileForm.here(group, dim, dtype)
    if form is None or not form.num_tokens:
        return None
    what = f"attention of prompts with {group} heads of {dim} in {dtype}"
    trial = Trial.drawn(group, dim, dtype, TRIED)
    made: TilesKernel | None = tried(what, lambda: TilesKernel(form), trial.is_right)
    if made is None or not torch.cpu.get_capabilities().get("amx_tile"):
        return made
    theirs, ours = seconds(trial.by_torch, trial.computed_by(made))
    if MUCH * theirs < ours:
        logger.info("torch computes %s: it is faster here", what)
        return None
    return made


def seconds(*computed: Callable[[], Tensor]) -> list[float]:
    """Return what each of these takes, the least of some tries, which take turns: other processes slow all alike."""
    found: list[list[float]] = [[] for _ in computed]
    for _ in range(TRIES):
        for compute, taken in zip(computed, found, strict=True):
            began = time.perf_counter()
            compute()
            taken.append(time.perf_counter() - began)
    return list(map(min, found))
