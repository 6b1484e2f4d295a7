"""Single queries over lanes of keys and values, by a kernel of our own where this machine has one."""

from __future__ import annotations

import functools
import logging
import math
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.engine.cpu.calling import KINDS, Kernel, float_bits
from serve_app.engine.cpu.sequence import Call
from serve_app.engine.decoder.openmp import libgomp

if TYPE_CHECKING:
    from serve_app.engine.cpu.attention_form import Form

logger = logging.getLogger(__name__)

NUM_PARAMETERS = 17
SHORT = 1 << 15
"""Numbers of keys, counted for each head that sees them, that one thread reads sooner than it wakes another."""
KEYS_PER_HEAD = 256
"""Keys that a prompt's queries may see for each query head that shares a key head, as those are read together, where
numbers are not multiplied in pairs. Of torch's time, with 7 heads that share one: 0.3 to 0.6 where a prompt begins,
0.65 to 0.95 at 1024 keys, 1.05 for 512 queries at 3000; with none to share 0.4 to 0.8 where it begins, 1.05 for 256
queries at 256, 1.4 for 64 at 1500."""
KEYS_IN_PAIRS = 1024
"""The same in pairs with none to share: 0.6 where a prompt begins, 0.9 at 1024 keys, 1.05 from 2000 on. Two heads and
more share any number of keys: 0.4 to 0.7 of torch's time from 256 keys to 32768."""
ITEMS = 2048
"""Of a call, at most, if it has several rows. What those of divided rows leave is 7.6 MB with two key heads of 64 that
seven query heads share each, and 34 MB with eight of 128 that four share."""
TRIED_LENGTHS = (1, 70, 1100)
"""Keys of the rows that a kernel is tried with: a part of a block, more than one, more than two stretches."""
TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 5e-3, torch.float32: 1e-4}
"""Of results that are about one, by which it may differ from torch's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One query: which packed token it is, and its keys, from a position of the storage on; or a tile of them.

    num_queries: of the tile, one behind the other, each of which sees a key more, in as many stretches as the first
    elsewhere:   positions from which its first stretches are read instead, where the same keys and values lie
    """

    token: int
    position: int
    num_keys: int
    elsewhere: Sequence[int] = ()
    num_queries: int = 1

    def begins(self, stretch: int) -> Sequence[int]:
        """Positions from which its stretches are read, whole ones but for the last."""
        own = range(self.position, self.position + self.num_keys, stretch)
        return [*self.elsewhere, *own[len(self.elsewhere) :]] if self.elsewhere else own

    def num_items(self, stretch: int) -> int:
        """Into which it is divided; a tile is not."""
        return -(-self.num_keys // stretch) if self.num_queries == 1 else 1


class Table:
    """The rows of a step, as the kernel reads them; one layer after the other."""

    def __init__(self, rows: Sequence[Row]) -> None:
        from serve_app.engine.cpu.attention_form import STRETCH

        items: list[tuple[int, ...]] = []
        of_tiles: list[int] = []
        for number, row in enumerate(rows):
            begins = row.begins(STRETCH)
            if row.num_queries > 1:
                items.append((row.token, len(of_tiles), row.num_keys, 0, 1, number, row.num_queries))
                of_tiles += begins
                continue
            for at, position in enumerate(begins):
                length = min(STRETCH, row.num_keys - at * STRETCH)
                items.append((row.token, position, length, at, len(begins), number, 1))
        self._begins = torch.tensor(of_tiles, dtype=torch.int64)
        self.items = torch.tensor(items, dtype=torch.int64)
        if of_tiles:  # where they lie, for which in the list
            is_tile = self.items[:, -1] > 1
            self.items[is_tile, 1] = self._begins.data_ptr() + self._begins.itemsize * self.items[is_tile, 1]
        self.num_rows = len(rows)
        self.num_keys = sum(row.num_keys * row.num_queries for row in rows)
        self.is_divided = len(items) > len(rows)
        self._left: dict[int, tuple[Tensor, Tensor]] = {}

    def left(self, heads: int, partial: int) -> tuple[Tensor, Tensor]:
        """What items of divided rows leave, and how many of each have ended.

        heads: items of each stretch;  partial: numbers of each
        """
        if not self.is_divided:
            return self.items, self.items  # nobody writes there
        if heads not in self._left:
            ended = torch.zeros(self.num_rows * heads, dtype=torch.int64)
            self._left[heads] = torch.empty(len(self.items) * heads * partial), ended
        return self._left[heads]


def tables_of(rows: Sequence[Row]) -> list[Table]:
    """The rows in tables of so many items that what their parts leave stays small, long as they may be."""
    from serve_app.engine.cpu.attention_form import STRETCH

    groups: list[list[Row]] = [[]]
    num_items = 0
    for row in rows:
        if groups[-1] and num_items + row.num_items(STRETCH) > ITEMS:
            groups.append([])
            num_items = 0
        groups[-1].append(row)
        num_items += row.num_items(STRETCH)
    return [Table(group) for group in groups]


class RowsKernel:
    """Attends for rows of one form: so many heads of such a size.

    most_keys: that a query of a prompt may see if it is to be sooner than torch
    tile:      queries of a prompt that attend together, at most; 1 where each does by itself
    """

    def __init__(self, kernel: Kernel, form: Form, *, most_keys: float) -> None:
        self.most_keys = most_keys
        self.tile = form.tile
        self._kernel = kernel
        self._parts = form.parts
        self._partial = form.partial

    def run(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Table,
        output: Tensor,
        *,
        scale: float,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write the rows' results to their tokens of the output.

        query, output: [tokens, heads, dim];  keys, values: [positions, kv_heads, dim], contiguous
        new: the key and the value of each row's last position, [tokens, kv_heads, dim], which are written there before;
             no other row may read them
        """
        query = _packed(query)
        new_key, new_value = (None, None) if new is None else (_packed(new[0]), _packed(new[1]))
        num_heads = keys.shape[1]
        partial, ended = table.left(num_heads * self._parts, self._partial)
        self._kernel(
            len(table.items), num_heads, query.data_ptr(), query.stride(0), output.data_ptr(), keys.data_ptr(),
            values.data_ptr(), num_heads * query.shape[2], float_bits(scale * math.log2(math.e)),
            table.items.data_ptr(), partial.data_ptr(), ended.data_ptr(), *_place(new_key), *_place(new_value),
            is_short=table.num_keys * query.shape[1] * query.shape[2] <= SHORT,
        )  # fmt: skip

    def call(
        self, query: Tensor, output: Tensor, new: tuple[Tensor, Tensor] | None, *, num_heads: int, scale: float
    ) -> Call:
        """As `run`, but for keys, values and what `parameters_of` a table are. num_heads: of keys"""
        from serve_app.engine.cpu import attention_kernel as of

        (key, key_stride), (value, value_stride) = map(_place, (None, None) if new is None else new)
        return Call(
            kernel=self._kernel,
            names=of.PARAMETERS,
            given={
                "num_heads": num_heads,
                "query": query.data_ptr(),
                "query_stride": query.stride(0),
                "output": output.data_ptr(),
                "stride": num_heads * query.shape[2],
                "scale": float_bits(scale * math.log2(math.e)),
                "new_key": key,
                "new_key_stride": key_stride,
                "new_value": value,
                "new_value_stride": value_stride,
            },
        )

    def parameters_of(self, table: Table, num_heads: int) -> dict[str, int]:
        """What a call has to know of the rows. They are there as long as the table is. num_heads: of keys"""
        partial, ended = table.left(num_heads * self._parts, self._partial)
        return {
            "num_items": len(table.items),
            "items": table.items.data_ptr(),
            "partial": partial.data_ptr(),
            "ended": ended.data_ptr(),
        }


def _packed(heads: Tensor) -> Tensor:
    """[tokens, heads, dim] with the heads of a token side by side."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()


def _place(heads: Tensor | None) -> tuple[int, int]:
    """Where it begins, and how far it is from one token to the next; nowhere."""
    return (0, 0) if heads is None else (heads.data_ptr(), heads.stride(0))


@functools.cache
def rows_kernel(group: int, dim: int, dtype: torch.dtype) -> RowsKernel | None:
    """The kernel for heads of that size, `group` of which share a key head; None where this machine has none.

    It takes half a second to make, and is tried beside torch before it is used.
    """
    if dtype not in KINDS or libgomp() is None:
        return None
    try:
        kernel = _make(group, dim, dtype)
    except (ImportError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        logger.warning("attention is torch's: no kernel could be made (%s)", error)
        return None
    if kernel is not None and not _is_right(kernel, group, dim, dtype):
        logger.warning("attention is torch's: the kernel for %d heads of %d in %s is wrong", group, dim, dtype)
        return None
    return kernel


def _make(group: int, dim: int, dtype: torch.dtype) -> RowsKernel | None:
    from serve_app.engine.cpu import attention_form, attention_kernel, compiling

    machine = compiling.Machine.here()
    if dim % machine.width:
        return None
    form = attention_form.Form(
        group=group,
        dim=dim,
        kind=KINDS[dtype],
        width=machine.width,
        registers=machine.registers,
        in_pairs=machine.has_pairs and dtype == torch.bfloat16 and dim % (2 * machine.width) == 0,
    )
    made = Kernel(compiling.compiled(attention_kernel.emit, **asdict(form)), attention_kernel.NAME)
    most_keys = (math.inf if group > 1 else KEYS_IN_PAIRS) if form.in_pairs else KEYS_PER_HEAD * group
    return RowsKernel(made, form, most_keys=most_keys)


@torch.inference_mode()
def _is_right(kernel: RowsKernel, group: int, dim: int, dtype: torch.dtype) -> bool:
    draw = torch.Generator().manual_seed(0)
    num_keys, rows = max(TRIED_LENGTHS), len(TRIED_LENGTHS)
    query = torch.randn(rows, group * 2, dim, generator=draw).to(dtype)
    keys, values = torch.randn(2, num_keys, 2, dim, generator=draw).to(dtype)
    output = torch.zeros_like(query)
    table = Table([Row(token=at, position=0, num_keys=length) for at, length in enumerate(TRIED_LENGTHS)])
    kernel.run(query, keys, values, table, output, scale=dim**-0.5)
    for at, length in enumerate(TRIED_LENGTHS):
        one, seen, read = (
            part.float().transpose(0, 1) for part in (query[at : at + 1], keys[:length], values[:length])
        )
        exact = F.scaled_dot_product_attention(one, seen, read, enable_gqa=True)[:, 0]
        if not torch.allclose(output[at].float(), exact, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]):
            return False
    return True
