"""Queries of a prompt, one position behind the other, that attend together to the keys that all of them see.

A block of keys is turned into columns, and its values into pairs, once for all of a tile's queries, whose products then
come from the nearest cache. Behind the last block that all see each query goes on by itself. What is added up for a
query is added in the order in which it would be alone, so it gets the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from serve_app.engine.cpu.attention_blocks import Blocks, merged
from serve_app.engine.cpu.attention_form import BLOCK, LEAST, STRETCH, Form
from serve_app.engine.cpu.emitter import FLOAT, INT32, INT64, Emitter, Value
from serve_app.engine.cpu.pairs import Pairs

MOST_ROWS = 12
"""Heads whose sums are in registers together, two vectors of each."""
VECTORS = 2
UNROLLED = 4
"""Pairs; a divisor of those of a block, and of a head that is whole vectors of pairs."""


class Tiles:
    """Writes what a tile's queries do. All of them are divided into as many stretches."""

    def __init__(self, form: Form, emitter: Emitter, blocks: Blocks, *, scale: Value) -> None:
        """blocks: for what a query does by itself;  scale: a vector, log2(e) in it"""
        self._form = form
        self._build = emitter.builder
        self._emit = emitter
        self._pairs = Pairs(emitter)
        self._blocks = blocks
        self._scale = scale
        self._columns = emitter.local(BLOCK * form.dim // 2)  # [pairs, keys]
        self._interleaved = emitter.local(BLOCK // 2 * form.dim)  # [pairs of values, dim]
        self._merged = emitter.local(form.tile * form.partial)
        self._query_at: Callable[[Value], Value] = lambda number: number
        self._count: Value = None
        self._keys: Value = None
        self._values: Value = None
        self._last: Value = None

    def see(
        self,
        query_at: Callable[[Value], Value],
        count: Value,
        lane_at: Callable[[Value], tuple[Value, Value]],
        num_keys: Value,
    ) -> None:
        """Attend to all keys and values.

        query_at: the address of a query's first head;  num_keys: that the first of `count` queries sees
        lane_at:  the addresses of a stretch's first key and value
        """
        build = self._build
        self._query_at, self._count = query_at, count

        def stretch(begin: Value) -> Sequence[Value]:
            seen = self._emit.least(build.sub(num_keys, begin), INT64(STRETCH))
            self._keys, self._values = lane_at(build.sdiv(begin, INT64(STRETCH)))
            self._last = build.sub(seen, INT64(1))
            common = build.and_(seen, INT64(-BLOCK))
            is_last = build.icmp_signed("<=", build.sub(num_keys, begin), INT64(STRETCH))
            self._each(self._forget)
            self._emit.repeat(INT64(0), common, BLOCK, self._block)
            self._each(functools.partial(self._end, begin, common, seen, is_last))
            return ()

        self._emit.repeat(INT64(0), num_keys, STRETCH, stretch)

    def state(self, number: Value, head: int) -> tuple[list[Value], Value]:
        """What a query's head has come to: the sums of its values by their weights, and that of its weights."""
        _, total, *sums = self._read(number, head)
        return sums, total

    def _each(self, body: Callable[[Value], None]) -> None:
        """Of the queries."""

        def one(number: Value) -> Sequence[Value]:
            body(number)
            return ()

        self._emit.repeat(INT64(0), self._count, 1, one)

    def _places(self, number: Value, head: int) -> list[Value]:
        """Where a head's largest score, total and sums are kept between stretches."""
        form = self._form
        base = self._build.mul(number, INT64(form.partial))
        sums = [head * form.dim + at * form.width for at in range(form.vectors)]
        behind = form.heads * form.dim + head
        return [self._build.add(base, INT64(at)) for at in (behind, behind + form.heads, *sums)]

    def _read(self, number: Value, head: int) -> list[Value]:
        top, total, *sums = self._places(number, head)
        numbers = [self._emit.number(self._merged, at) for at in (top, total)]
        return [*numbers, *(self._emit.floats(self._merged, at) for at in sums)]

    def _put(self, number: Value, head: int, values: Sequence[Value]) -> None:
        for place, value in zip(self._places(number, head), values, strict=True):
            self._emit.put(value, self._merged, place)

    def _forget(self, number: Value) -> None:
        self._blocks.choose(number)
        self._blocks.forget()

    def _end(self, first: Value, begin: Value, seen: Value, is_last: Value, number: Value) -> None:
        """What a query sees behind the blocks that all see, and its stretch into what it has come to.

        first: key of the stretch;  seen: keys of it that the first query sees
        """
        is_first = self._build.icmp_signed("==", first, INT64(0))
        self._blocks.choose(number)
        more = self._build.select(is_last, number, INT64(0))
        num_keys = self._build.add(seen, more)
        self._blocks.see_rest(self._keys, self._values, begin, num_keys, self._query_at(number))
        for head in range(self._form.heads):
            blocks = self._blocks
            found = [blocks.top(head), blocks.total(head), *blocks.sums(head)]
            nothing = [FLOAT(LEAST), FLOAT(0.0), *[self._emit.all_of(0.0)] * self._form.vectors]
            so_far = zip(nothing, self._read(number, head), strict=True)
            before = [self._build.select(is_first, none, some) for none, some in so_far]
            self._put(number, head, merged(self._emit, before, found))

    def _block(self, begin: Value) -> Sequence[Value]:
        self._emit.repeat(INT64(0), INT64(BLOCK), self._form.width, functools.partial(self._turn_keys, begin))
        self._emit.repeat(INT64(0), INT64(BLOCK // 2), 1, functools.partial(self._pair_values, begin))
        self._each(self._attend)
        return ()

    def _turn_keys(self, begin: Value, at: Value) -> Sequence[Value]:
        """A vector of keys into columns."""
        build, emitter, form = self._build, self._emit, self._form
        positions = [build.add(build.add(begin, at), INT64(number)) for number in range(form.width)]
        places = [self._blocks.place(self._keys, position) for position in positions]
        for position in positions:
            self._fetch_next(self._keys, position)
        for first in range(0, form.dim, 2 * form.width):
            columns = self._pairs.transposed([self._pairs.read(place, first) for place in places])
            for number, column in enumerate(columns, first // 2):
                build.store(column, emitter.at(self._columns, build.add(at, INT64(number * BLOCK)), INT32), align=4)
        return ()

    def _pair_values(self, begin: Value, at: Value) -> Sequence[Value]:
        """Two values into pairs."""
        build, emitter, form = self._build, self._emit, self._form
        first = build.add(begin, build.mul(at, INT64(2)))
        positions = [build.add(first, INT64(number)) for number in range(2)]
        places = [self._blocks.place(self._values, position) for position in positions]
        target = emitter.at(self._interleaved, build.mul(at, INT64(form.dim)), INT32)
        for position in positions:
            self._fetch_next(self._values, position)
        for start in range(0, form.dim, 2 * form.width):
            pairs = self._pairs.interleaved(*(self._pairs.read(place, start) for place in places))
            for number, pair in enumerate(pairs):
                build.store(pair, emitter.at(target, start + number * form.width, INT32), align=4)
        return ()

    def _fetch_next(self, base: Value, position: Value) -> None:
        """That of the next block, while this one is computed."""
        self._blocks.fetch(base, self._emit.least(self._build.add(position, INT64(BLOCK)), self._last))

    def _attend(self, number: Value) -> None:
        """One query to the block."""
        emitter, form, blocks = self._emit, self._form, self._blocks
        blocks.choose(number)
        query = self._query_at(number)
        for first in range(0, form.heads, MOST_ROWS):
            heads = range(first, min(first + MOST_ROWS, form.heads))
            words = [emitter.at(query, head * form.dim // 2, INT32) for head in heads]
            scored = functools.partial(self._score, heads, words)
            emitter.repeat(INT64(0), INT64(BLOCK), VECTORS * form.width, scored)
        blocks.find_tops()
        for head in range(form.heads):
            blocks.weigh(head)
        for first in range(0, form.heads, MOST_ROWS):
            heads = range(first, min(first + MOST_ROWS, form.heads))
            emitter.repeat(INT64(0), INT64(form.dim), VECTORS * form.width, functools.partial(self._add, heads))

    def _score(self, heads: Sequence[int], words: Sequence[Value], at: Value) -> Sequence[Value]:
        """Of two vectors of keys, from that one on."""
        build, emitter, form = self._build, self._emit, self._form
        columns = emitter.at(self._columns, at, INT32)
        nothing = [emitter.all_of(0.0)] * (VECTORS * len(heads))
        found = self._multiplied(words, columns, form.dim // 2, BLOCK, nothing)
        for (head, more), products in zip(self._vectors(heads), found, strict=True):
            place = build.add(at, INT64(head * BLOCK + more))
            emitter.put(build.fmul(products, self._scale), self._blocks.scores, place)
        return ()

    def _add(self, heads: Sequence[int], at: Value) -> Sequence[Value]:
        """The block's values by their weights, two vectors of a head's numbers from that one on."""
        build, emitter, form = self._build, self._emit, self._form
        places = [build.add(at, INT64(head * form.dim + more)) for head, more in self._vectors(heads)]
        before = [emitter.floats(self._blocks.sums_of_chosen, place) for place in places]
        words = [emitter.at(self._blocks.scores, head * BLOCK, INT32) for head in heads]
        found = self._multiplied(words, emitter.at(self._interleaved, at, INT32), BLOCK // 2, form.dim, before)
        for place, total in zip(places, found, strict=True):
            emitter.put(total, self._blocks.sums_of_chosen, place)
        return ()

    def _vectors(self, heads: Sequence[int]) -> list[tuple[int, int]]:
        """Each head with where each of its vectors begins."""
        return [(head, number * self._form.width) for head in heads for number in range(VECTORS)]

    def _multiplied(
        self, words: Sequence[Value], vectors: Value, count: int, stride: int, totals: Sequence[Value]
    ) -> list[Value]:
        """Each row's sums with what so many pairs add, one behind the other at its address.

        vectors: where those of the first pair are;  stride: words from one pair's to the next
        """
        build, emitter = self._build, self._emit

        def multiply(at: Value, *sums: Value) -> Sequence[Value]:
            for more in range(UNROLLED):
                number = build.add(at, INT64(more))
                base = emitter.at(vectors, build.mul(number, INT64(stride)), INT32)
                read = [self._pairs.read_words(base, each * self._form.width) for each in range(VECTORS)]
                sums = tuple(self._pairs.add_rows([emitter.at(word, number, INT32) for word in words], read, sums))
            return sums

        return emitter.repeat(INT64(0), INT64(count), UNROLLED, multiply, totals)
