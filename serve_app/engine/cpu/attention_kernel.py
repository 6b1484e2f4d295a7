"""Attention of queries over keys and values that lie one position behind the other, in one pass over both.

Each item is a stretch of one row's keys for the query heads that share a key head, or a tile of a prompt's queries with
all that these see; threads take one after the other.
Stretches of one row are merged by whoever ends the last of them (Flash-Decoding). How a row is divided depends on its
own length alone, so what comes out is the same to its last bit, whatever is computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from serve_app.engine.cpu.attention_blocks import Blocks, merged
from serve_app.engine.cpu.attention_form import LEAST, Form
from serve_app.engine.cpu.attention_tiles import Tiles
from serve_app.engine.cpu.emitter import FLOAT, INT16, INT32, INT64, POINTER, Emitter, Value

PARAMETERS = (
    "counter", "num_items", "num_heads", "query", "query_stride", "output", "keys", "values", "stride", "scale",
    "items", "partial", "ended", "new_key", "new_key_stride", "new_value", "new_value_stride",
)  # fmt: skip
"""Each int64. num_heads: of keys;  stride: numbers from one position, or token, to the next
scale: bits of a float32, log2(e) in it;  num_items: stretches of rows; those without a meaning here are addresses, of
what is new 0 where nothing is
"""
COLUMNS = ("token", "position", "num_keys", "stretch", "num_stretches", "row", "num_queries")
"""Of an item, int64 each. position: of its first key, or where those of a tile's stretches are
stretch:     which of its row's
num_queries: one, or a tile's, of which each sees a key more than the one before, in as many stretches as the first
"""
NAME = "attend"


def emit(**fields: Any) -> Any:
    """The module of LLVM's with the function `NAME` of the parameters' address; fields: of the `Form`"""
    form = Form(**fields)
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
        self._tiles = Tiles(form, emitter, self._blocks, scale=scale) if form.tile > 1 else None
        self._item: Value = None
        self._row: dict[str, Value] = {}
        self._keys: Value = None
        self._values: Value = None
        self._result: Value = None
        self._query: Value = None
        self._width: Value = None

    def write(self) -> None:
        heads = self._build.mul(self._of["num_heads"], INT64(self._form.parts))
        count = self._build.mul(self._of["num_items"], heads)
        self._emit.take_items(self._address("counter"), count, lambda item: self._attend(item, heads))

    def _attend(self, item: Value, heads: Value) -> None:
        self._item = item
        key_head = self._begin(heads)
        lanes = self._keys, self._values
        if self._tiles is None:
            self._attend_alone(heads, key_head)
            return
        is_alone = self._build.icmp_signed("==", self._row["num_queries"], INT64(1))
        with self._build.if_else(is_alone) as (then, otherwise):
            with then:
                self._attend_alone(heads, key_head)
            with otherwise:  # behind the other one, as what is chosen for a tile stays so
                self._attend_together(self._tiles, *lanes)

    def _attend_alone(self, heads: Value, key_head: Value) -> None:
        self._keys, self._values = (self._blocks.place(at, self._row["position"]) for at in (self._keys, self._values))
        self._blocks.begin(self._query)
        self._write_new(self._row["token"], key_head)
        self._blocks.see(self._keys, self._values, self._row["num_keys"])
        is_whole = self._build.icmp_signed("==", self._row["num_stretches"], INT64(1))
        with self._build.if_else(is_whole) as (then, otherwise):
            with then:
                for head in range(self._form.heads):
                    self._finish(self._result, head, self._blocks.sums(head), self._blocks.total(head))
            with otherwise:
                self._leave(heads)

    def _attend_together(self, tiles: Tiles, keys: Value, values: Value) -> None:
        build, count = self._build, self._row["num_queries"]
        begins = build.inttoptr(self._row["position"], POINTER)

        def query_at(number: Value) -> Value:
            return self._emit.at(self._query, build.mul(number, self._of["query_stride"]), self._number)

        def finish(number: Value) -> Sequence[Value]:
            result = self._emit.at(self._result, build.mul(number, self._width), self._number)
            for head in range(self._form.heads):
                self._finish(result, head, *tiles.state(number, head))
            return ()

        def lane_at(stretch: Value) -> tuple[Value, Value]:
            position = self._emit.number(begins, stretch, INT64)
            return self._blocks.place(keys, position), self._blocks.place(values, position)

        tiles.see(query_at, count, lane_at, self._row["num_keys"])
        self._emit.repeat(INT64(0), count, 1, finish)

    def _address(self, name: str) -> Value:
        return self._build.inttoptr(self._of[name], POINTER)

    def _begin(self, heads: Value) -> Value:
        """Read the item's row of the table, and find what it is about.

        Returns the numbers of a position before those of its key head.
        """
        build, emitter, form = self._build, self._emit, self._form
        part = build.srem(self._item, heads)
        table = emitter.at(self._address("items"), build.mul(build.sdiv(self._item, heads), INT64(len(COLUMNS))), INT64)
        self._row = {name: emitter.number(table, at, INT64) for at, name in enumerate(COLUMNS)}
        key_head = build.mul(build.sdiv(part, INT64(form.parts)), INT64(form.dim))
        self._keys, self._values = (emitter.at(self._address(at), key_head, self._number) for at in ("keys", "values"))
        token, queries = self._row["token"], build.mul(part, INT64(form.heads * form.dim))
        self._width = build.mul(heads, INT64(form.heads * form.dim))
        start = build.add(build.mul(token, self._width), queries)
        self._result = emitter.at(self._address("output"), start, self._number)
        start = build.add(build.mul(token, self._of["query_stride"]), queries)
        self._query = emitter.at(self._address("query"), start, self._number)
        return key_head

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
