"""Attention of single queries over keys and values in pages, in one pass over both.

Each item is a stretch of one row's keys for the query heads that share a key head; threads take one after the other.
Blocks of 64 keys are scored, weighed against the largest score so far and their values added up (arXiv 2205.14135).
Stretches of one row are merged by whoever ends the last of them (Flash-Decoding). How a row is divided depends on its
own length alone, so what comes out is the same to its last bit, whatever is computed beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from serve_app.kernels.cpu.compiling import KINDS, Machine
from serve_app.kernels.cpu.emitter import FLOAT, INT32, INT64, Emitter, Kind, Value

BLOCK = 64
STRETCH = 512
"""Keys of an item, whole blocks."""
LINE = 64
"""Bytes that come from memory together."""
LEAST = -1e30
"""A score that no key has."""
MAX_UNROLLED = 64
"""Vectors of the query heads of one item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of a model's heads for which a kernel is compiled.

    group: query heads that share a key head;  dim: of a head, whole vectors;  width: numbers of a vector
    registers: vectors that the CPU holds
    """

    group: int
    dim: int
    kind: Kind
    width: int
    registers: int

    @classmethod
    def here(cls, group: int, dim: int, dtype: torch.dtype) -> Self | None:
        """Return the form for this machine; None where no kernel has it."""
        machine = Machine.here()
        if dtype not in KINDS or dim % machine.width:
            return None
        return cls(group=group, dim=dim, kind=KINDS[dtype], width=machine.width, registers=machine.registers)

    @property
    def vectors(self) -> int:
        """Of a head."""
        return self.dim // self.width

    @property
    def parts(self) -> int:
        """Into how many items a group is divided, so that what is written out for each stays small."""
        fits = (part for part in range(1, self.group + 1) if self.group % part == 0)
        return next((part for part in fits if self.group // part * self.vectors <= MAX_UNROLLED), self.group)

    @property
    def heads(self) -> int:
        """Query heads of an item."""
        return self.group // self.parts

    @property
    def widens_keys(self) -> bool:
        """Whether keys are made float32 once for all heads of an item, and not for each."""
        return self.kind != "float32" and self.heads > 2

    @property
    def padded_heads(self) -> int:
        """Query heads of an item, in whole vectors."""
        return -(-self.heads // self.width) * self.width

    @property
    def partial(self) -> int:
        """Numbers that an item leaves: its sums of values, then largest scores and sums of weights of each head."""
        return self.heads * (self.dim + 2)


def merged(emitter: Emitter, before: Sequence[Value], found: Sequence[Value]) -> list[Value]:
    """Of two parts of a head's keys what both make: the largest score, the sum of weights, those of values by them."""
    build = emitter.builder
    top = emitter.larger(before[0], found[0])
    kept, share = (emitter.power_of_two(emitter.spread(build.fsub(part[0], top))) for part in (before, found))
    total = build.fadd(build.fmul(before[1], emitter.first(kept)), build.fmul(found[1], emitter.first(share)))
    parts = zip(found[2:], before[2:], strict=True)
    return [top, total, *(emitter.fused(share, new, build.fmul(kept, old)) for new, old in parts)]


PARAMETERS = (
    "counter", "num_items", "num_heads", "query", "query_stride", "output", "keys", "values", "slots", "stride",
    "scale", "items", "partial", "ended",
)  # fmt: skip
"""Each int64. num_heads: of keys;  stride: numbers from one slot to the next
scale: bits of a float32, log2(e) in it;  num_items: stretches of rows; those without a meaning here are addresses
"""
COLUMNS = ("token", "position", "num_keys", "stretch", "num_stretches", "row")
"""Of an item, int64 each. position: of its first key, among the slots;  stretch: which of its row's"""
NAME = "attend"


class Writer:
    """Writes the function. What differs from item to item is set as it is reached.

    In the function's own memory are the item's queries, sums of values by their weights, largest scores, which weights
    are relative to, and sums of weights; and the scores of a block, [heads, BLOCK], which become its weights.
    """

    def __init__(self, form: Form) -> None:
        self._form = form
        self._emit = emitter = Emitter(NAME, PARAMETERS, width=form.width, kind=form.kind)
        self._build = emitter.builder
        self._scale = emitter.spread(self._build.bitcast(self._build.trunc(emitter.of["scale"], INT32), FLOAT))
        self._query, self._sums = (emitter.local(form.heads * form.dim) for _ in range(2))
        self._widened = emitter.local(form.width * form.dim) if form.widens_keys else None
        self._scores = emitter.local(form.heads * BLOCK)
        self._found, self._shrunk, self._tops = (emitter.local(form.padded_heads) for _ in range(3))
        self._totals: Value = emitter.local(form.heads * form.width)
        self._item: Value = None
        self._heads: Value = None
        self._row: dict[str, Value] = {}
        self._keys: Value = None
        self._values: Value = None
        self._slots: Value = None
        self._result: Value = None

    def write(self) -> Any:
        """Return the module of LLVM's with the function `NAME` of the parameters' address."""
        self._heads = self._build.mul(self._emit.of["num_heads"], INT64(self._form.parts))
        return self._emit.take_items(self._build.mul(self._emit.of["num_items"], self._heads), self._attend)

    def _attend(self, item: Value) -> None:
        emitter, form = self._emit, self._form
        self._item = item
        self._begin()
        num_keys = self._row["num_keys"]
        first = emitter.least(num_keys, INT64(BLOCK))
        emitter.repeat(INT64(0), first, 1, functools.partial(self._fetch, self._keys))
        emitter.repeat(INT64(0), num_keys, BLOCK, self._block)
        is_whole = self._build.icmp_signed("==", self._row["num_stretches"], INT64(1))
        with self._build.if_else(is_whole) as (then, otherwise):
            with then:
                for head in range(form.heads):
                    self._finish(head, self._vectors(self._sums, head), self._total(head))
            with otherwise:
                self._leave()

    def _begin(self) -> None:
        """Read the item's row of the table and its queries, and find what it is about. Nothing was seen yet."""
        build, emitter, form = self._build, self._emit, self._form
        part = build.srem(self._item, self._heads)
        self._row = emitter.row("items", build.sdiv(self._item, self._heads), COLUMNS)
        key_head = build.mul(build.sdiv(part, INT64(form.parts)), INT64(form.dim))
        self._keys, self._values = (emitter.at(emitter.address(at), key_head) for at in ("keys", "values"))
        token, queries = self._row["token"], build.mul(part, INT64(form.heads * form.dim))
        width = build.mul(self._heads, INT64(form.heads * form.dim))
        self._result = emitter.at(emitter.address("output"), build.add(build.mul(token, width), queries))
        start = build.add(build.mul(token, emitter.of["query_stride"]), queries)
        query = emitter.at(emitter.address("query"), start)
        for at in range(0, form.heads * form.dim, form.width):
            emitter.put(emitter.read(query, at), self._query, at)
            emitter.put(emitter.all_of(0.0), self._sums, at)
        for at in range(0, form.padded_heads, form.width):
            emitter.put(emitter.all_of(LEAST), self._tops, at)
            emitter.put(emitter.all_of(LEAST), self._found, at)
        for head in range(form.heads):
            emitter.put(emitter.all_of(0.0), self._totals, head * form.width)
        self._slots = emitter.at(emitter.address("slots"), self._row["position"], INT64)

    def _block(self, begin: Value) -> None:
        build, emitter, form = self._build, self._emit, self._form
        left = build.sub(self._row["num_keys"], begin)
        is_part = build.icmp_signed("<", left, INT64(BLOCK))
        count = emitter.least(left, INT64(BLOCK))
        with build.if_then(is_part):
            for at in range(0, form.heads * BLOCK, form.width):
                emitter.put(emitter.all_of(LEAST), self._scores, at)
        emitter.repeat(INT64(0), count, form.width, functools.partial(self._score, begin, count))
        self._find_tops()
        for head in range(form.heads):
            self._weigh(head)
        together = max(1, form.registers // 2 // form.vectors)
        whole = build.mul(build.sdiv(count, INT64(together)), INT64(together))
        emitter.repeat(INT64(0), whole, together, functools.partial(self._add, begin, together))
        emitter.repeat(whole, count, 1, functools.partial(self._add, begin, 1))

    def _place(self, base: Value, position: Value) -> Value:
        """Where a key or value begins."""
        slot = self._emit.number(self._slots, position, INT64)
        return self._emit.at(base, self._build.mul(slot, self._emit.of["stride"]))

    def _fetch(self, base: Value, position: Value) -> None:
        """Bring a key or value near, while others are computed."""
        begin = self._place(base, position)
        size = 4 if self._form.kind == "float32" else 2
        for at in range(0, self._form.dim, LINE // size):
            self._emit.fetch(self._emit.at(begin, at))

    def _vectors(self, base: Value, head: int) -> list[Value]:
        form = self._form
        return [self._emit.floats(base, head * form.dim + at) for at in range(0, form.dim, form.width)]

    def _score(self, begin: Value, count: Value, at: Value) -> None:
        """The products of a vector of keys with each head's query, scaled; behind the last key is none."""
        build, emitter, form = self._build, self._emit, self._form
        last = build.sub(count, INT64(1))
        keys = []
        for number in range(form.width):
            own = build.add(at, INT64(number))
            exists = build.icmp_signed("<", own, last)
            position = build.add(begin, build.select(exists, own, last))
            keys.append(self._key(position, number))
            self._fetch(self._values, position)
        left = emitter.spread(build.trunc(build.sub(count, at), INT32))
        exist = build.icmp_signed("<", emitter.whole_numbers, left)
        for head in range(form.heads):
            products = emitter.totals(self._products(keys, head))
            scores = build.select(exist, build.fmul(products, self._scale), emitter.all_of(LEAST))
            emitter.put(scores, self._scores, build.add(at, INT64(head * BLOCK)))

    def _key(self, position: Value, number: int) -> Value:
        """Where a key is read from, the number-th of those that are scored together."""
        place, form = self._place(self._keys, position), self._form
        if self._widened is None:
            return place
        for at in range(0, form.dim, form.width):
            self._emit.put(self._emit.read(place, at), self._widened, number * form.dim + at)
        return self._emit.at(self._widened, number * form.dim, FLOAT)

    def _products(self, keys: Sequence[Value], head: int) -> list[Value]:
        """For each key a vector, whose sum is its product with a head's query."""
        emitter, form = self._emit, self._form
        read = emitter.floats if form.widens_keys else emitter.read
        products = [emitter.all_of(0.0)] * len(keys)
        for at in range(0, form.dim, form.width):
            query = emitter.floats(self._query, INT64(head * form.dim + at))
            vectors = [read(key, at) for key in keys]
            products = [emitter.fused(key, query, each) for each, key in zip(products, vectors, strict=True)]
        return products

    def _find_tops(self) -> None:
        """Each head's largest score so far, and what that makes of its sums, of a vector of heads at once."""
        build, emitter, form = self._build, self._emit, self._form
        for head in range(form.heads):
            scores = [emitter.floats(self._scores, place) for place in self._places(head)]
            emitter.put(emitter.largest(functools.reduce(emitter.larger, scores)), self._found, head)
        for at in range(0, form.padded_heads, form.width):
            before = emitter.floats(self._tops, at)
            top = emitter.larger(before, emitter.floats(self._found, at))
            emitter.put(top, self._tops, at)
            emitter.put(emitter.power_of_two(build.fsub(before, top)), self._shrunk, at)

    def _places(self, head: int) -> range:
        """Of a head's vectors of scores."""
        return range(head * BLOCK, (head + 1) * BLOCK, self._form.width)

    def _weigh(self, head: int) -> None:
        """Scores to weights, which are added up; what was summed before shrinks."""
        build, emitter, form = self._build, self._emit, self._form
        top, shrunk = (emitter.spread(emitter.number(base, head)) for base in (self._tops, self._shrunk))
        weights = [
            emitter.power_of_two(build.fsub(emitter.floats(self._scores, place), top)) for place in self._places(head)
        ]
        total = build.fmul(emitter.floats(self._totals, head * form.width), shrunk)
        for place, weight in zip(self._places(head), weights, strict=True):
            emitter.put(weight, self._scores, place)
        total = build.fadd(total, functools.reduce(build.fadd, weights))
        emitter.put(total, self._totals, head * form.width)
        for at, vector in zip(range(0, form.dim, form.width), self._vectors(self._sums, head), strict=True):
            emitter.put(build.fmul(vector, shrunk), self._sums, head * form.dim + at)

    def _total(self, head: int) -> Value:
        """Of weights."""
        return self._emit.folded(self._emit.floats(self._totals, head * self._form.width))

    def _add(self, begin: Value, together: int, at: Value) -> None:
        """Values, so many at once, by their weights to each head's sums."""
        build, emitter, form = self._build, self._emit, self._form
        places = [build.add(at, INT64(number)) for number in range(together)]
        bases = (self._place(self._values, build.add(begin, place)) for place in places)
        values = [[emitter.read(base, number) for number in range(0, form.dim, form.width)] for base in bases]
        for place in places:
            following = build.add(build.add(begin, place), INT64(BLOCK))
            self._fetch(self._keys, emitter.least(following, build.sub(self._row["num_keys"], INT64(1))))
        for head in range(form.heads):
            weights = [
                emitter.spread(emitter.number(self._scores, build.add(place, INT64(head * BLOCK)))) for place in places
            ]
            for number, vector in enumerate(self._vectors(self._sums, head)):
                for weight, value in zip(weights, values, strict=True):
                    vector = emitter.fused(weight, value[number], vector)
                emitter.put(vector, self._sums, head * form.dim + number * form.width)

    def _finish(self, head: int, sums: Sequence[Value], total: Value) -> None:
        """Write a head's result."""
        build, emitter, form = self._build, self._emit, self._form
        share = emitter.spread(build.fdiv(FLOAT(1.0), total))
        for at, vector in zip(range(0, form.dim, form.width), sums, strict=True):
            emitter.write(build.fmul(vector, share), self._result, head * form.dim + at)

    def _leave(self) -> None:
        """Leave the stretch's part, and merge all of the row where it is the last to end."""
        build, emitter, form, heads = self._build, self._emit, self._form, self._heads
        partial = emitter.address("partial")
        mine = emitter.at(partial, build.mul(self._item, INT64(form.partial)), FLOAT)
        for head in range(form.heads):
            for number, vector in enumerate(self._vectors(self._sums, head)):
                emitter.put(vector, mine, head * form.dim + number * form.width)
            emitter.put(emitter.number(self._tops, head), mine, form.heads * form.dim + head)
            emitter.put(self._total(head), mine, form.heads * (form.dim + 1) + head)
        part = build.add(build.mul(self._row["row"], heads), build.srem(self._item, heads))
        ended = emitter.at(emitter.address("ended"), part, INT64)
        others = build.atomic_rmw("add", ended, INT64(1), "acq_rel")
        with build.if_then(build.icmp_signed("==", others, build.sub(self._row["num_stretches"], INT64(1)))):
            build.store(INT64(0), ended)
            first = build.sub(self._item, build.mul(self._row["stretch"], heads))
            base = emitter.at(partial, build.mul(first, INT64(form.partial)), FLOAT)
            for head in range(form.heads):
                self._merge(head, base, build.mul(heads, INT64(form.partial)))

    def _merge(self, head: int, base: Value, stride: Value) -> None:
        """Sum up a head's parts of all stretches, in their order.

        stride: numbers from one stretch's to the next one's
        """
        build, emitter, form = self._build, self._emit, self._form

        def merge(number: Value, *before: Value) -> Sequence[Value]:
            start = build.mul(number, stride)
            behind = [build.add(start, INT64(form.heads * (form.dim + at) + head)) for at in range(2)]
            places = [build.add(start, INT64(head * form.dim + at * form.width)) for at in range(form.vectors)]
            found = [emitter.number(base, at) for at in behind] + [emitter.floats(base, at) for at in places]
            return merged(emitter, before, found)

        nothing = [FLOAT(LEAST), FLOAT(0.0), *[emitter.all_of(0.0)] * form.vectors]
        _, total, *sums = emitter.repeat(INT64(0), self._row["num_stretches"], 1, merge, nothing)
        self._finish(head, sums, total)
