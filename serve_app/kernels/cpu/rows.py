"""Attention of short spans over keys and values in pages, by a kernel of our own."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.kernels.cpu import attention
from serve_app.kernels.cpu.attention import STRETCH, Form
from serve_app.kernels.cpu.compiling import KINDS, Kernel, Machine, float_bits, tried
from serve_app.kernels.forms import Row

SHORT = 1 << 15
"""Numbers of keys, counted for each head that sees them, that one thread reads sooner than it wakes another."""
ITEMS = 2048
"""Of a call, at most, if it has several rows. What those of divided rows leave is 7.6 MB with two key heads of 64 that
seven query heads share each, and 34 MB with eight of 128 that four share."""
TRIED_LENGTHS = (1, 70, 1100)
"""Keys of the rows that a kernel is tried with: a part of a block, more than one, more than two stretches."""
TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 5e-3, torch.float32: 1e-4}
"""Of results that are about one, by which it may differ from torch's."""


class Table:
    """The rows of a step, as the kernel reads them; one layer after the other."""

    def __init__(self, rows: Sequence[Row]) -> None:
        items: list[tuple[int, ...]] = []
        for number, row in enumerate(rows):
            begins = range(0, row.num_keys, STRETCH)
            for at, begin in enumerate(begins):
                length = min(STRETCH, row.num_keys - begin)
                items.append((row.token, row.position + begin, length, at, len(begins), number))
        self.items = torch.tensor(items, dtype=torch.int64)
        self.num_rows = len(rows)
        self.num_keys = sum(row.num_keys for row in rows)
        self.is_divided = len(items) > len(rows)
        self._left: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def left(self, heads: int, partial: int) -> tuple[Tensor, Tensor]:
        """Return room for what items of divided rows leave, and for how many of each have ended.

        heads: items of each stretch;  partial: numbers of each
        """
        if not self.is_divided:
            return self.items, self.items  # nobody writes there
        if (heads, partial) not in self._left:
            ended = torch.zeros(self.num_rows * heads, dtype=torch.int64)
            self._left[heads, partial] = torch.empty(len(self.items) * heads * partial), ended
        return self._left[heads, partial]


class RowsKernel:
    """Attends for rows of one form: so many heads of such a size."""

    def __init__(self, form: Form) -> None:
        """Raises RuntimeError where LLVM makes no kernel."""
        self._kernel = Kernel(attention.emit(form), attention.NAME)
        self._parts = form.parts
        self._partial = form.partial

    def run(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        table: Table,
        output: Tensor,
        *,
        scale: float,
    ) -> None:
        """Write the rows' results to their tokens of the output.

        query, output: [tokens, heads, dim];  keys, values: [slots, kv_heads, dim], contiguous
        slots: int64, where among those the rows' keys are;  table: of rows, whose positions are among the slots
        """
        query = query if query.stride()[1:] == (query.shape[2], 1) else query.contiguous()
        num_heads = keys.shape[1]
        partial, ended = table.left(num_heads * self._parts, self._partial)
        self._kernel(
            len(table.items), num_heads, query.data_ptr(), query.stride(0), output.data_ptr(), keys.data_ptr(),
            values.data_ptr(), slots.data_ptr(), num_heads * query.shape[2], float_bits(scale * math.log2(math.e)),
            table.items.data_ptr(), partial.data_ptr(), ended.data_ptr(),
            is_short=table.num_keys * query.shape[1] * query.shape[2] <= SHORT,
        )  # fmt: skip

    @staticmethod
    def tables(rows: Sequence[Row]) -> list[Table]:
        """Return the rows in tables of so many items that what their parts leave stays small, long as they may be."""
        groups: list[list[Row]] = [[]]
        num_items = 0
        for row in rows:
            own = -(-row.num_keys // STRETCH)
            if groups[-1] and num_items + own > ITEMS:
                groups.append([])
                num_items = 0
            groups[-1].append(row)
            num_items += own
        return [Table(group) for group in groups]


@functools.cache
def rows_kernel(group: int, dim: int, dtype: torch.dtype) -> RowsKernel | None:
    """Return the kernel for heads of that size, `group` of which share a key head; None if there is none.

    It takes half a second to make, and is tried beside torch before it is used.
    """
    machine = Machine.here()
    if dtype not in KINDS or dim % machine.width:
        return None
    form = Form(group=group, dim=dim, kind=KINDS[dtype], width=machine.width, registers=machine.registers)
    return tried(
        f"attention of {group} heads of {dim} in {dtype}",
        lambda: RowsKernel(form),
        lambda made: _is_right(made, group, dim, dtype),
    )


def _is_right(kernel: RowsKernel, group: int, dim: int, dtype: torch.dtype) -> bool:
    draw = torch.Generator().manual_seed(0)
    num_keys, rows = max(TRIED_LENGTHS), len(TRIED_LENGTHS)
    query = torch.randn(rows, group * 2, dim, generator=draw).to(dtype)
    keys, values = torch.randn(2, num_keys, 2, dim, generator=draw).to(dtype)
    slots = torch.randperm(num_keys, generator=draw)
    output = torch.zeros_like(query)
    table = Table([Row(token=at, position=0, num_keys=length) for at, length in enumerate(TRIED_LENGTHS)])
    kernel.run(query, keys, values, slots, table, output, scale=dim**-0.5)
    for at, length in enumerate(TRIED_LENGTHS):
        one, seen, read = (
            part.float().transpose(0, 1) for part in (query[at : at + 1], keys[slots[:length]], values[slots[:length]])
        )
        exact = F.scaled_dot_product_attention(one, seen, read, enable_gqa=True)[:, 0]
        if not torch.allclose(output[at].float(), exact, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]):
            return False
    return True
