"""Queries that share a key head, over blocks of keys and values: scores, weights, and sums of values so far.

Blocks of 64 keys are scored, weighed against the largest score so far and their values added up, as in arXiv
2205.14135. What comes next is fetched meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from serve_app.engine.cpu.attention_form import BLOCK, LEAST, LINE, Form
from serve_app.engine.cpu.emitter import FLOAT, INT16, INT32, INT64, Emitter, Kind, Value
from serve_app.engine.cpu.pairs import Pairs


class Blocks:
    """Writes what an item's heads do with its keys and values. Those are set as the item is reached.

    What was seen is kept for each query of a tile; the first one's is set where nothing else is said.

    scores: where a query's are, [heads, BLOCK]; behind `weigh` their weights, pairs of which lie in its half
    """

    def __init__(self, form: Form, emitter: Emitter, *, scale: Value, stride: Value) -> None:
        """scale: a vector, log2(e) in it;  stride: numbers from one key, or value, to the next"""
        self._form = form
        self._build = emitter.builder
        self._emit = emitter
        self._pairs = Pairs(emitter)
        self._number = FLOAT if form.kind == "float32" else INT16
        self._scale = scale
        self._stride = stride
        self._query: Value = emitter.local(form.heads * form.dim)
        self._sums_of_all = self._sums = emitter.local(form.tile * form.heads * form.dim)
        self._widened = emitter.local(form.width * form.dim) if form.widens_keys else None
        self.scores = emitter.local(form.heads * BLOCK)
        self._found, self._shrunk = (emitter.local(form.padded_heads) for _ in range(2))
        self._tops_of_all = self._tops = emitter.local(form.tile * form.padded_heads)
        self._totals_of_all = self._totals = emitter.local(form.tile * form.heads * form.width)
        self._keys: Value = None
        self._values: Value = None
        self._num_keys: Value = None

    @property
    def sums_of_chosen(self) -> Value:
        """Where the chosen query's sums are, [heads, dim]."""
        return self._sums

    def _part(self, base: Value, number: Value, size: int) -> Value:
        return self._emit.at(base, self._build.mul(number, INT64(size)), FLOAT)

    def choose(self, number: Value) -> None:
        """What was seen is a tile's number-th query's from now on."""
        form = self._form
        self._sums = self._part(self._sums_of_all, number, form.heads * form.dim)
        self._tops = self._part(self._tops_of_all, number, form.padded_heads)
        self._totals = self._part(self._totals_of_all, number, form.heads * form.width)

    def begin(self, query: Value) -> None:
        """Nothing was seen yet. query: the address of the first head's"""
        emitter, form = self._emit, self._form
        if not form.in_pairs:
            for at in range(0, form.heads * form.dim, form.width):
                emitter.put(emitter.read(form.kind, query, at), self._query, at)
        self._query = query if form.in_pairs else self._query
        self.forget()

    def forget(self) -> None:
        """Nothing was seen yet."""
        emitter, form = self._emit, self._form
        for at in range(0, form.heads * form.dim, form.width):
            emitter.put(emitter.all_of(0.0), self._sums, at)
        for at in range(0, form.padded_heads, form.width):
            emitter.put(emitter.all_of(LEAST), self._tops, at)
            emitter.put(emitter.all_of(LEAST), self._found, at)
        for head in range(form.heads):
            emitter.put(emitter.all_of(0.0), self._totals, head * form.width)

    def see(self, keys: Value, values: Value, num_keys: Value) -> None:
        """Attend to keys and values, of which these are the first ones' addresses."""
        first = self._emit.least(num_keys, INT64(BLOCK))
        self._emit.repeat(INT64(0), first, 1, functools.partial(self.fetch, keys))
        self.see_rest(keys, values, INT64(0), num_keys)

    def see_rest(self, keys: Value, values: Value, begin: Value, num_keys: Value, query: Value = None) -> None:
        """Attend to those from a block's first on. query: whose, where that is not who began"""
        self._query = self._query if query is None else query
        self._keys, self._values, self._num_keys = keys, values, num_keys
        self._emit.repeat(begin, num_keys, BLOCK, self._block)

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
        if form.in_pairs:
            emitter.repeat(INT64(0), count, 2 * together, functools.partial(self._add_pairs, begin, count, together))
            return ()
        whole = build.mul(build.sdiv(count, INT64(together)), INT64(together))
        emitter.repeat(INT64(0), whole, together, functools.partial(self._add, begin, together))
        emitter.repeat(whole, count, 1, functools.partial(self._add, begin, 1))
        return ()

    def place(self, base: Value, position: Value) -> Value:
        """Where a key or value begins."""
        return self._emit.at(base, self._build.mul(position, self._stride), self._number)

    def fetch(self, base: Value, position: Value) -> Sequence[Value]:
        """Bring a key or value near, while others are computed."""
        begin = self.place(base, position)
        size = 4 if self._form.kind == "float32" else 2
        for at in range(0, self._form.dim, LINE // size):
            self._emit.fetch(self._emit.at(begin, at, self._number), cache=2)
        return ()

    def _read(self, base: Value, position: Value) -> list[Value]:
        """The vectors of a key or value."""
        begin = self.place(base, position)
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
            self.fetch(self._values, position)
        left = emitter.spread(build.trunc(build.sub(count, at), INT32))
        exist = build.icmp_signed("<", emitter.whole_numbers, left)
        for head, products in enumerate(self._by_columns(keys) if form.by_columns else self._across(keys)):
            scores = build.select(exist, build.fmul(products, self._scale), emitter.all_of(LEAST))
            emitter.put(scores, self.scores, build.add(at, INT64(head * BLOCK)))
        return ()

    def _by_columns(self, keys: Sequence[Value]) -> list[Value]:
        """Of each head its query's products with a vector of keys, added up pair by pair."""
        form = self._form
        found = [self._emit.all_of(0.0)] * form.heads
        for at in range(0, form.dim, 2 * form.width):
            columns = self._pairs.transposed([self._pairs.read(key, at) for key in keys])
            for head in range(form.heads):
                for number, column in enumerate(columns):
                    word = INT64((head * form.dim + at) // 2 + number)
                    found[head] = self._pairs.dot(found[head], self._pairs.spread(self._query, word), column)
        return found

    def _across(self, keys: Sequence[Value]) -> list[Value]:
        """The same, each key's by itself and summed across."""
        return [self._emit.totals(self._products(keys, head)) for head in range(self._form.heads)]

    def _key(self, position: Value, number: int) -> Value:
        """Where a key is read from, the number-th of those that are scored together."""
        place, form = self.place(self._keys, position), self._form
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
        for at in range(0, form.dim, form.width * (1 + form.in_pairs)):
            place = INT64(head * form.dim + at)
            if form.in_pairs:
                query = self._pairs.read(self._query, place)
                pairs = [self._pairs.read(key, at) for key in keys]
                products = [self._pairs.dot(each, query, key) for each, key in zip(products, pairs, strict=True)]
            else:
                query = emitter.floats(self._query, place)
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
        if form.in_pairs:  # they lie where half of the scores were
            for at, pair in enumerate(zip(weights[::2], weights[1::2], strict=True)):
                pairs = self._pairs.rounded(*pair)
                build.store(pairs, emitter.at(self.scores, head * BLOCK + at * form.width, FLOAT), align=4)
                total = self._pairs.dot(total, pairs, self._pairs.ones)
        else:
            for place, weight in zip(self._places(head), weights, strict=True):
                emitter.put(weight, self.scores, place)
            total = build.fadd(total, functools.reduce(build.fadd, weights))
        emitter.put(total, self._totals, head * form.width)
        for at, vector in zip(range(0, form.dim, form.width), self._vectors(self._sums, head), strict=True):
            emitter.put(build.fmul(vector, shrunk), self._sums, head * form.dim + at)

    def _add_pairs(self, begin: Value, count: Value, together: int, at: Value) -> Sequence[Value]:
        """As `_add`, pairs of values, so many at once; behind the last value is none, its weight is nothing."""
        build, emitter, form = self._build, self._emit, self._form
        last = build.sub(self._num_keys, INT64(1))
        pairs = []
        for number in range(together):
            positions = [build.add(build.add(begin, at), INT64(2 * number + each)) for each in range(2)]
            bases = [self.place(self._values, self._emit.least(position, last)) for position in positions]
            pairs.append(
                [
                    pair
                    for start in range(0, form.dim, 2 * form.width)
                    for pair in self._pairs.interleaved(*(self._pairs.read(base, start) for base in bases))
                ]
            )
            for position in positions:
                self.fetch(self._keys, self._emit.least(build.add(position, INT64(BLOCK)), last))
        for head in range(form.heads):
            first = build.add(INT64(head * BLOCK), build.sdiv(at, INT64(2)))
            weights = [self._pairs.spread(self.scores, build.add(first, INT64(each))) for each in range(together)]
            for number, vector in enumerate(self._vectors(self._sums, head)):
                for weight, values in zip(weights, pairs, strict=True):
                    vector = self._pairs.dot(vector, weight, values[number])
                emitter.put(vector, self._sums, head * form.dim + number * form.width)
        return ()

    def _add(self, begin: Value, together: int, at: Value) -> Sequence[Value]:
        """Values, so many at once, by their weights to each head's sums."""
        build, emitter, form = self._build, self._emit, self._form
        places = [build.add(at, INT64(number)) for number in range(together)]
        values = [self._read(self._values, build.add(begin, place)) for place in places]
        for place in places:
            following = build.add(build.add(begin, place), INT64(BLOCK))
            self.fetch(self._keys, self._emit.least(following, build.sub(self._num_keys, INT64(1))))
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
