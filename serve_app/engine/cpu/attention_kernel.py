"""Attention of single queries over keys and values that lie one position behind the other, in one pass over both.

Each item is a stretch of one row's keys for the query heads that share a key head; threads take one after the other.
Stretches of one row are merged by whoever ends the last of them (Flash-Decoding). How a row is divided depends on its
own length alone, so what comes out is the same to its last bit, whatever is computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from serve_app.engine.cpu.attention_blocks import LEAST, Blocks, Form
from serve_app.engine.cpu.emitter import FLOAT, INT16, INT32, INT64, POINTER, Emitter, Value

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
NAME = "attend"


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
        scale = emitter.spread(self._build.bitcast(self._build.trunc(parameters["scale"], INT32), FLOAT))
        self._blocks = Blocks(form, emitter, scale=scale, stride=parameters["stride"])
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
        self._blocks.see(self._keys, self._values, self._row["num_keys"])
        is_whole = self._build.icmp_signed("==", self._row["num_stretches"], INT64(1))
        with self._build.if_else(is_whole) as (then, otherwise):
            with then:
                for head in range(self._form.heads):
                    self._finish(head, self._blocks.sums(head), self._blocks.total(head))
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
        self._blocks.begin(emitter.at(self._address("query"), start, self._number))
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
