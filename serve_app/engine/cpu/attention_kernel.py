"""Attention of single queries over keys and values that lie one position behind the other, in one pass over both.

Each item is a stretch of one row's keys for the query heads that share a key head; threads take one after the other.
Blocks of 64 keys are scored, weighed against the largest score so far and their values added up, as in arXiv
2205.14135; stretches of one row are merged by whoever ends the last of them (Flash-Decoding). How a row is divided
depends on its own length alone, so what comes out is the same to its last bit, whatever is computed beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from serve_app.engine.cpu.emitter import FLOAT, INT16, INT32, INT64, POINTER, Emitter, Kind, Value

PARAMETERS = (
    "counter", "num_items", "num_heads", "query", "query_stride", "output", "keys", "values", "stride", "scale",
    "items", "partial", "ended", "new_key", "new_key_stride", "new_value", "new_value_stride",
)  # fmt: skip
"""Each int64. num_heads: of keys;  stride: numbers from one position, or token, to the next
scale: bits of a float32, log2(e) in it;  num_items: stretches of rows; those without a meaning here are addresses, of
what is new 0 where nothing is
"""
COLUMNS = ("token", "position", "num_keys", "stretch", "num_stretches", "row")
"""Of an item, int64 each. position: of its first key;  stretch: which of its row's."""
STRETCH = 512
"""Keys of an item."""
BLOCK = 64
LINE = 64
"""Bytes that come from memory together."""
LEAST = -1e30
"""A score that no key has."""
MAX_UNROLLED = 64
"""Vectors of the query heads of one item."""
NAME = "attend"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """group: query heads that share a key head;  dim: of a head, whole vectors;  width: numbers of a vector
    registers: vectors that the CPU holds
    in_pairs: whether keys and queries are multiplied as pairs of bfloat16
    """

    group: int
    dim: int
    kind: Kind
    width: int
    registers: int
    in_pairs: bool

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
    def padded_heads(self) -> int:
        """The same in whole vectors."""
        return -(-self.heads // self.width) * self.width

    @property
    def partial(self) -> int:
        """Numbers that an item leaves: its sums of values, then largest scores and sums of weights of each head."""
        return self.heads * (self.dim + 2)


def emit(form: Form) -> Any:
    """The module of LLVM's with the function `NAME` of the parameters' address."""
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
        self._scale = emitter.spread(self._build.bitcast(self._build.trunc(parameters["scale"], INT32), FLOAT))
        self._query: Value = emitter.local(form.heads * form.dim)
        self._sums = emitter.local(form.heads * form.dim)
        self._scores = emitter.local(form.heads * BLOCK)
        self._tops, self._found, self._shrunk = (emitter.local(form.padded_heads) for _ in range(3))
        self._totals = emitter.local(form.heads * form.width)
        self._item: Value = None
        self._row: dict[str, Value] = {}
        self._keys: Value = None
        self._values: Value = None
        self._result: Value = None

    def write(self) -> None:
        heads = self._build.mul(self._of["num_heads"], INT64(self._form.parts))
        count = self._build.mul(self._of["num_items"], heads)
        self._emit.take_items(self._address("counter"), count, lambda item: self._attend(item, heads))

    def _attend(self, item: Value, heads: Value) -> None:
        self._item = item
        self._begin(heads)
        first = self._least(self._row["num_keys"], INT64(BLOCK))
        self._emit.repeat(INT64(0), first, 1, functools.partial(self._fetch, self._keys))
        self._emit.repeat(INT64(0), self._row["num_keys"], BLOCK, self._block)
        is_whole = self._build.icmp_signed("==", self._row["num_stretches"], INT64(1))
        with self._build.if_else(is_whole) as (then, otherwise):
            with then:
                for head in range(self._form.heads):
                    self._finish(head, self._vectors(self._sums, head), self._total(head))
            with otherwise:
                self._leave(heads)

    def _address(self, name: str) -> Value:
        return self._build.inttoptr(self._of[name], POINTER)

    def _begin(self, heads: Value) -> None:
        """Read the item's row of the table and its queries, and empty its sums."""
        build, emitter, form = self._build, self._emit, self._form
        part = build.srem(self._item, heads)
        table = emitter.at(self._address("items"), build.mul(build.sdiv(self._item, heads), INT64(len(COLUMNS))), INT64)
        self._row = {name: emitter.number(table, at, INT64) for at, name in enumerate(COLUMNS)}
        key_head = build.mul(build.sdiv(part, INT64(form.parts)), INT64(form.dim))
        first = build.add(build.mul(self._row["position"], self._of["stride"]), key_head)
        self._keys = emitter.at(self._address("keys"), first, self._number)
        self._values = emitter.at(self._address("values"), first, self._number)
        token, queries = self._row["token"], build.mul(part, INT64(form.heads * form.dim))
        width = build.mul(heads, INT64(form.heads * form.dim))
        self._result = emitter.at(self._address("output"), build.add(build.mul(token, width), queries), self._number)
        start = build.add(build.mul(token, self._of["query_stride"]), queries)
        query = emitter.at(self._address("query"), start, self._number)
        for at in range(0, form.heads * form.dim, form.width):
            if not form.in_pairs:
                emitter.put(emitter.read(form.kind, query, at), self._query, at)
            emitter.put(emitter.all_of(0.0), self._sums, at)
        self._query = query if form.in_pairs else self._query
        for at in range(0, form.padded_heads, form.width):
            emitter.put(emitter.all_of(LEAST), self._tops, at)
            emitter.put(emitter.all_of(LEAST), self._found, at)
        for head in range(form.heads):
            emitter.put(emitter.all_of(0.0), self._totals, head * form.width)
        self._write_new(token, key_head)

    def _write_new(self, token: Value, key_head: Value) -> None:
        """Put a row's new key and value behind the others, where whoever attends to its last stretch will read them.

        key_head: numbers of a position before those of the item's head
        """
        build, emitter, form = self._build, self._emit, self._form
        is_last = build.icmp_signed("==", self._row["stretch"], build.sub(self._row["num_stretches"], INT64(1)))
        is_new = build.icmp_signed("!=", self._of["new_key"], INT64(0))
        with build.if_then(build.and_(is_last, is_new)):
            last = build.mul(build.sub(self._row["num_keys"], INT64(1)), self._of["stride"])
            for name, lane in (("new_key", self._keys), ("new_value", self._values)):
                start = build.add(build.mul(token, self._of[f"{name}_stride"]), key_head)
                new, place = emitter.at(self._address(name), start, self._number), emitter.at(lane, last, self._number)
                for at in range(0, form.dim, form.width):
                    emitter.copy(form.kind, new, place, at)

    def _block(self, begin: Value) -> Sequence[Value]:
        build, emitter, form = self._build, self._emit, self._form
        left = build.sub(self._row["num_keys"], begin)
        is_part = build.icmp_signed("<", left, INT64(BLOCK))
        count = self._least(left, INT64(BLOCK))
        with build.if_then(is_part):
            for at in range(0, form.heads * BLOCK, form.width):
                emitter.put(emitter.all_of(LEAST), self._scores, at)
        emitter.repeat(INT64(0), count, form.width, functools.partial(self._score, begin, count))
        self._find_tops()
        for head in range(form.heads):
            self._weigh(head)
        together = max(1, form.registers // 2 // form.vectors)
        if form.in_pairs:
            emitter.repeat(INT64(0), count, 2 * together, functools.partial(self._add_pairs, begin, count, together))
            return ()
        whole = build.mul(build.sdiv(count, INT64(together)), INT64(together))
        emitter.repeat(INT64(0), whole, together, functools.partial(self._add, begin, together))
        emitter.repeat(whole, count, 1, functools.partial(self._add, begin, 1))
        return ()

    def _place(self, base: Value, position: Value) -> Value:
        """Where a key or value begins."""
        return self._emit.at(base, self._build.mul(position, self._of["stride"]), self._number)

    def _least(self, x: Value, y: Value) -> Value:
        return self._build.select(self._build.icmp_signed("<", x, y), x, y)

    def _fetch(self, base: Value, position: Value) -> Sequence[Value]:
        """Bring a key or value near, while others are computed."""
        begin = self._place(base, position)
        size = 4 if self._form.kind == "float32" else 2
        for at in range(0, self._form.dim, LINE // size):
            self._emit.fetch(self._emit.at(begin, at, self._number), cache=2)
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
            keys.append(self._place(self._keys, position))
            self._fetch(self._values, position)
        left = emitter.spread(build.trunc(build.sub(count, at), INT32))
        exist = build.icmp_signed("<", emitter.whole_numbers, left)
        for head in range(form.heads):
            products = [self._product(key, INT64(head * form.dim)) for key in keys]
            scores = build.fmul(emitter.totals(products), self._scale)
            scores = build.select(exist, scores, emitter.all_of(LEAST))
            emitter.put(scores, self._scores, build.add(at, INT64(head * BLOCK)))
        return ()

    def _product(self, key: Value, query: Value) -> Value:
        """A vector, whose sum is that of a key and a query; query: where it begins among those of all heads."""
        build, emitter, form = self._build, self._emit, self._form
        product = emitter.all_of(0.0)
        for at in range(0, form.dim, form.width * (1 + form.in_pairs)):
            asked = build.add(query, INT64(at))
            if form.in_pairs:
                product = emitter.dot(product, emitter.pairs(self._query, asked), emitter.pairs(key, at))
            else:
                right = emitter.floats(self._query, asked)
                product = emitter.fused(emitter.read(form.kind, key, at), right, product)
        return product

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
        if form.in_pairs:  # they lie where half of the scores were
            for at, pair in enumerate(zip(weights[::2], weights[1::2], strict=True)):
                pairs = emitter.paired(*pair)
                build.store(pairs, emitter.at(self._scores, head * BLOCK + at * form.width, FLOAT), align=4)
                total = emitter.dot(total, pairs, emitter.one_pairs)
        else:
            for place, weight in zip(self._places(head), weights, strict=True):
                emitter.put(weight, self._scores, place)
            total = build.fadd(total, functools.reduce(build.fadd, weights))
        emitter.put(total, self._totals, head * form.width)
        for at, vector in zip(range(0, form.dim, form.width), self._vectors(self._sums, head), strict=True):
            emitter.put(build.fmul(vector, shrunk), self._sums, head * form.dim + at)

    def _add_pairs(self, begin: Value, count: Value, together: int, at: Value) -> Sequence[Value]:
        """As `_add`, pairs of values, so many at once; behind the last value is none, its weight is nothing."""
        build, emitter, form = self._build, self._emit, self._form
        last = build.sub(self._row["num_keys"], INT64(1))
        pairs = []
        for number in range(together):
            positions = [build.add(build.add(begin, at), INT64(2 * number + each)) for each in range(2)]
            bases = [self._place(self._values, self._least(position, last)) for position in positions]
            pairs.append(
                [
                    pair
                    for start in range(0, form.dim, 2 * form.width)
                    for pair in emitter.interleaved(*(emitter.pairs(base, start) for base in bases))
                ]
            )
            for position in positions:
                self._fetch(self._keys, self._least(build.add(position, INT64(BLOCK)), last))
        for head in range(form.heads):
            first = build.add(INT64(head * BLOCK), build.sdiv(at, INT64(2)))
            weights = [emitter.spread_pair(self._scores, build.add(first, INT64(each))) for each in range(together)]
            for number, vector in enumerate(self._vectors(self._sums, head)):
                for weight, values in zip(weights, pairs, strict=True):
                    vector = emitter.dot(vector, weight, values[number])
                emitter.put(vector, self._sums, head * form.dim + number * form.width)
        return ()

    def _add(self, begin: Value, together: int, at: Value) -> Sequence[Value]:
        """Values, so many at once, by their weights to each head's sums."""
        build, emitter, form = self._build, self._emit, self._form
        places = [build.add(at, INT64(number)) for number in range(together)]
        values = [self._read(self._values, build.add(begin, place)) for place in places]
        for place in places:
            following = build.add(build.add(begin, place), INT64(BLOCK))
            self._fetch(self._keys, self._least(following, build.sub(self._row["num_keys"], INT64(1))))
        for head in range(form.heads):
            weights = [
                emitter.spread(emitter.number(self._scores, build.add(place, INT64(head * BLOCK)))) for place in places
            ]
            for number, vector in enumerate(self._vectors(self._sums, head)):
                for weight, value in zip(weights, values, strict=True):
                    vector = emitter.fused(weight, value[number], vector)
                emitter.put(vector, self._sums, head * form.dim + number * form.width)
        return ()

    def _top(self, head: int) -> Value:
        return self._emit.number(self._tops, head)

    def _total(self, head: int) -> Value:
        return self._emit.folded(self._emit.floats(self._totals, head * self._form.width))

    def _finish(self, head: int, sums: Sequence[Value], total: Value) -> None:
        """Write a head's result."""
        build, emitter, form = self._build, self._emit, self._form
        share = emitter.spread(build.fdiv(FLOAT(1.0), total))
        for at, vector in zip(range(0, form.dim, form.width), sums, strict=True):
            emitter.write(form.kind, build.fmul(vector, share), self._result, head * form.dim + at)

    def _leave(self, heads: Value) -> None:
        """Leave the stretch's part, and merge all of the row where it is the last to end."""
        build, emitter, form = self._build, self._emit, self._form
        partial = self._address("partial")
        mine = emitter.at(partial, build.mul(self._item, INT64(form.partial)), FLOAT)
        for at in range(0, form.heads * form.dim, form.width):
            emitter.put(emitter.floats(self._sums, at), mine, at)
        for head in range(form.heads):
            emitter.put(self._top(head), mine, form.heads * form.dim + head)
            emitter.put(self._total(head), mine, form.heads * (form.dim + 1) + head)
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

        def top_of(number: Value) -> Value:
            start = build.add(build.mul(number, stride), INT64(form.heads * form.dim + head))
            return emitter.number(base, start)

        def larger(number: Value, top: Value) -> Sequence[Value]:
            return [emitter.larger(top, top_of(number))]

        def added(number: Value, total: Value, *sums: Value) -> Sequence[Value]:
            share = emitter.power_of_two(emitter.spread(build.fsub(top_of(number), top)))
            start = build.mul(number, stride)
            own = emitter.number(base, build.add(start, INT64(form.heads * (form.dim + 1) + head)))
            places = [build.add(start, INT64(head * form.dim + at * form.width)) for at in range(form.vectors)]
            more = [emitter.fused(share, emitter.floats(base, at), sum_) for at, sum_ in zip(places, sums, strict=True)]
            return [build.fadd(total, build.fmul(own, emitter.first(share))), *more]

        count = self._row["num_stretches"]
        (top,) = emitter.repeat(INT64(0), count, 1, larger, [FLOAT(LEAST)])
        nothing = [emitter.all_of(0.0)] * form.vectors
        total, *sums = emitter.repeat(INT64(0), count, 1, added, [FLOAT(0.0), *nothing])
        self._finish(head, sums, total)
