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
from typing import Any

from llvmlite import ir

from serve_app.kernels.cpu.emitter import FLOAT, INT16, INT32, INT64, POINTER, Emitter, Kind, Value

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


class Blocks:
    """Writes what an item's heads do with its keys and values. Those are set as the item is reached.

    scores: where a query's are, [heads, BLOCK]; behind `weigh` their weights
    """

    def __init__(self, form: Form, emitter: Emitter, *, scale: Value, stride: Value) -> None:
        """scale: a vector, log2(e) in it;  stride: numbers from one key, or value, to the next"""
        self._form = form
        self._build = emitter.builder
        self._emit = emitter
        self._number = FLOAT if form.kind == "float32" else INT16
        self._scale = scale
        self._stride = stride
        self._query: Value = emitter.local(form.heads * form.dim)
        self._sums: Value = emitter.local(form.heads * form.dim)
        self._widened = emitter.local(form.width * form.dim) if form.widens_keys else None
        self.scores = emitter.local(form.heads * BLOCK)
        self._found, self._shrunk = (emitter.local(form.padded_heads) for _ in range(2))
        self._tops: Value = emitter.local(form.padded_heads)
        self._totals: Value = emitter.local(form.heads * form.width)
        self._keys: Value = None
        self._values: Value = None
        self._slots: Value = None
        self._num_keys: Value = None

    def begin(self, query: Value) -> None:
        """Nothing was seen yet. query: the address of the first head's"""
        emitter, form = self._emit, self._form
        for at in range(0, form.heads * form.dim, form.width):
            emitter.put(emitter.read(form.kind, query, at), self._query, at)
            emitter.put(emitter.all_of(0.0), self._sums, at)
        for at in range(0, form.padded_heads, form.width):
            emitter.put(emitter.all_of(LEAST), self._tops, at)
            emitter.put(emitter.all_of(LEAST), self._found, at)
        for head in range(form.heads):
            emitter.put(emitter.all_of(0.0), self._totals, head * form.width)

    def see(self, keys: Value, values: Value, slots: Value, num_keys: Value) -> None:
        """Attend to so many keys and values. slots: the address of their places in the pages, one after the other"""
        self._keys, self._values, self._slots, self._num_keys = keys, values, slots, num_keys
        first = self._emit.least(num_keys, INT64(BLOCK))
        self._emit.repeat(INT64(0), first, 1, functools.partial(self._fetch, keys))
        self._emit.repeat(INT64(0), num_keys, BLOCK, self._block)

    def sums(self, head: int) -> list[Value]:
        """Of values by their weights."""
        return self._vectors(self._sums, head)

    def top(self, head: int) -> Value:
        """The largest score, which weights are relative to."""
        return self._emit.number(self._tops, head)

    def total(self, head: int) -> Value:
        """Of weights."""
        return self._emit.folded(self._emit.floats(self._totals, head * self._form.width))

    def _block(self, begin: Value) -> Sequence[Value]:
        build, emitter, form = self._build, self._emit, self._form
        left = build.sub(self._num_keys, begin)
        is_part = build.icmp_signed("<", left, INT64(BLOCK))
        count = self._emit.least(left, INT64(BLOCK))
        with build.if_then(is_part):
            for at in range(0, form.heads * BLOCK, form.width):
                emitter.put(emitter.all_of(LEAST), self.scores, at)
        emitter.repeat(INT64(0), count, form.width, functools.partial(self._score, begin, count))
        self.find_tops()
        for head in range(form.heads):
            self.weigh(head)
        together = max(1, form.registers // 2 // form.vectors)
        whole = build.mul(build.sdiv(count, INT64(together)), INT64(together))
        emitter.repeat(INT64(0), whole, together, functools.partial(self._add, begin, together))
        emitter.repeat(whole, count, 1, functools.partial(self._add, begin, 1))
        return ()

    def _place(self, base: Value, position: Value) -> Value:
        """Where a key or value begins."""
        slot = self._emit.number(self._slots, position, INT64)
        return self._emit.at(base, self._build.mul(slot, self._stride), self._number)

    def _fetch(self, base: Value, position: Value) -> Sequence[Value]:
        """Bring a key or value near, while others are computed."""
        begin = self._place(base, position)
        size = 4 if self._form.kind == "float32" else 2
        for at in range(0, self._form.dim, LINE // size):
            self._emit.fetch(self._emit.at(begin, at, self._number))
        return ()

    def _read(self, base: Value, position: Value) -> list[Value]:
        """The vectors of a key or value."""
        begin = self._place(base, position)
        return [self._emit.read(self._form.kind, begin, at) for at in range(0, self._form.dim, self._form.width)]

    def _vectors(self, base: Value, head: int) -> list[Value]:
        form = self._form
        return [self._emit.floats(base, head * form.dim + at) for at in range(0, form.dim, form.width)]

    def _score(self, begin: Value, count: Value, at: Value) -> Sequence[Value]:
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
            emitter.put(scores, self.scores, build.add(at, INT64(head * BLOCK)))
        return ()

    def _key(self, position: Value, number: int) -> Value:
        """Where a key is read from, the number-th of those that are scored together."""
        place, form = self._place(self._keys, position), self._form
        if self._widened is None:
            return place
        for at in range(0, form.dim, form.width):
            self._emit.put(self._emit.read(form.kind, place, at), self._widened, number * form.dim + at)
        return self._emit.at(self._widened, number * form.dim, FLOAT)

    def _products(self, keys: Sequence[Value], head: int) -> list[Value]:
        """For each key a vector, whose sum is its product with a head's query."""
        emitter, form = self._emit, self._form
        kind: Kind = "float32" if form.widens_keys else form.kind
        products = [emitter.all_of(0.0)] * len(keys)
        for at in range(0, form.dim, form.width):
            query = emitter.floats(self._query, INT64(head * form.dim + at))
            vectors = [emitter.read(kind, key, at) for key in keys]
            products = [emitter.fused(key, query, each) for each, key in zip(products, vectors, strict=True)]
        return products

    def find_tops(self) -> None:
        """Each head's largest score so far, and what that makes of its sums, of a vector of heads at once."""
        build, emitter, form = self._build, self._emit, self._form
        for head in range(form.heads):
            scores = [emitter.floats(self.scores, place) for place in self._places(head)]
            emitter.put(emitter.largest(functools.reduce(emitter.larger, scores)), self._found, head)
        for at in range(0, form.padded_heads, form.width):
            before = emitter.floats(self._tops, at)
            top = emitter.larger(before, emitter.floats(self._found, at))
            emitter.put(top, self._tops, at)
            emitter.put(emitter.power_of_two(build.fsub(before, top)), self._shrunk, at)

    def _places(self, head: int) -> range:
        """Of a head's vectors of scores."""
        return range(head * BLOCK, (head + 1) * BLOCK, self._form.width)

    def weigh(self, head: int) -> None:
        """Scores to weights, which are added up; what was summed before shrinks."""
        build, emitter, form = self._build, self._emit, self._form
        top, shrunk = (emitter.spread(emitter.number(base, head)) for base in (self._tops, self._shrunk))
        weights = [
            emitter.power_of_two(build.fsub(emitter.floats(self.scores, place), top)) for place in self._places(head)
        ]
        total = build.fmul(emitter.floats(self._totals, head * form.width), shrunk)
        for place, weight in zip(self._places(head), weights, strict=True):
            emitter.put(weight, self.scores, place)
        total = build.fadd(total, functools.reduce(build.fadd, weights))
        emitter.put(total, self._totals, head * form.width)
        for at, vector in zip(range(0, form.dim, form.width), self._vectors(self._sums, head), strict=True):
            emitter.put(build.fmul(vector, shrunk), self._sums, head * form.dim + at)

    def _add(self, begin: Value, together: int, at: Value) -> Sequence[Value]:
        """Values, so many at once, by their weights to each head's sums."""
        build, emitter, form = self._build, self._emit, self._form
        places = [build.add(at, INT64(number)) for number in range(together)]
        values = [self._read(self._values, build.add(begin, place)) for place in places]
        for place in places:
            following = build.add(build.add(begin, place), INT64(BLOCK))
            self._fetch(self._keys, self._emit.least(following, build.sub(self._num_keys, INT64(1))))
        for head in range(form.heads):
            weights = [
                emitter.spread(emitter.number(self.scores, build.add(place, INT64(head * BLOCK)))) for place in places
            ]
            for number, vector in enumerate(self._vectors(self._sums, head)):
                for weight, value in zip(weights, values, strict=True):
                    vector = emitter.fused(weight, value[number], vector)
                emitter.put(vector, self._sums, head * form.dim + number * form.width)
        return ()


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


def emit(form: Form) -> Any:
    """Return the module of LLVM's with the function `NAME` of the parameters' address."""
    module = ir.Module(NAME)
    _Writer(form, *Emitter.of_function(module, NAME, form.width)).write()
    return module


class _Writer:
    """Writes the function. What differs from item to item is set as it is reached."""

    def __init__(self, form: Form, emitter: Emitter, given: Value) -> None:
        self._form = form
        self._build = emitter.builder
        self._emit = emitter
        self._number = FLOAT if form.kind == "float32" else INT16
        parameters = {name: emitter.number(given, at, INT64) for at, name in enumerate(PARAMETERS)}
        self._of = parameters
        scale = emitter.spread(self._build.bitcast(self._build.trunc(parameters["scale"], INT32), FLOAT))
        self._blocks = Blocks(form, emitter, scale=scale, stride=parameters["stride"])
        self._item: Value = None
        self._row: dict[str, Value] = {}
        self._keys: Value = None
        self._values: Value = None
        self._result: Value = None
        self._query: Value = None

    def write(self) -> None:
        heads = self._build.mul(self._of["num_heads"], INT64(self._form.parts))
        count = self._build.mul(self._of["num_items"], heads)
        self._emit.take_items(self._address("counter"), count, lambda item: self._attend(item, heads))

    def _attend(self, item: Value, heads: Value) -> None:
        self._item = item
        self._begin(heads)
        self._blocks.begin(self._query)
        slots = self._emit.at(self._address("slots"), self._row["position"], INT64)
        self._blocks.see(self._keys, self._values, slots, self._row["num_keys"])
        is_whole = self._build.icmp_signed("==", self._row["num_stretches"], INT64(1))
        with self._build.if_else(is_whole) as (then, otherwise):
            with then:
                for head in range(self._form.heads):
                    self._finish(self._result, head, self._blocks.sums(head), self._blocks.total(head))
            with otherwise:
                self._leave(heads)

    def _address(self, name: str) -> Value:
        return self._build.inttoptr(self._of[name], POINTER)

    def _begin(self, heads: Value) -> None:
        """Read the item's row of the table, and find what it is about."""
        build, emitter, form = self._build, self._emit, self._form
        part = build.srem(self._item, heads)
        table = emitter.at(self._address("items"), build.mul(build.sdiv(self._item, heads), INT64(len(COLUMNS))), INT64)
        self._row = {name: emitter.number(table, at, INT64) for at, name in enumerate(COLUMNS)}
        key_head = build.mul(build.sdiv(part, INT64(form.parts)), INT64(form.dim))
        self._keys, self._values = (emitter.at(self._address(at), key_head, self._number) for at in ("keys", "values"))
        token, queries = self._row["token"], build.mul(part, INT64(form.heads * form.dim))
        width = build.mul(heads, INT64(form.heads * form.dim))
        start = build.add(build.mul(token, width), queries)
        self._result = emitter.at(self._address("output"), start, self._number)
        start = build.add(build.mul(token, self._of["query_stride"]), queries)
        self._query = emitter.at(self._address("query"), start, self._number)

    def _finish(self, result: Value, head: int, sums: Sequence[Value], total: Value) -> None:
        """Write a head's result, those of whose query begin there."""
        build, emitter, form = self._build, self._emit, self._form
        share = emitter.spread(build.fdiv(FLOAT(1.0), total))
        for at, vector in zip(range(0, form.dim, form.width), sums, strict=True):
            emitter.write(form.kind, build.fmul(vector, share), result, head * form.dim + at)

    def _leave(self, heads: Value) -> None:
        """Leave the stretch's part, and merge all of the row where it is the last to end."""
        build, emitter, form = self._build, self._emit, self._form
        partial = self._address("partial")
        mine = emitter.at(partial, build.mul(self._item, INT64(form.partial)), FLOAT)
        for head in range(form.heads):
            for number, vector in enumerate(self._blocks.sums(head)):
                emitter.put(vector, mine, head * form.dim + number * form.width)
            emitter.put(self._blocks.top(head), mine, form.heads * form.dim + head)
            emitter.put(self._blocks.total(head), mine, form.heads * (form.dim + 1) + head)
        part = build.add(build.mul(self._row["row"], heads), build.srem(self._item, heads))
        ended = emitter.at(self._address("ended"), part, INT64)
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
        self._finish(self._result, head, sums, total)
