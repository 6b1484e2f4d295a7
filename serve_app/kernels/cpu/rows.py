"""Attention of short spans over keys and values in pages, by a kernel of our own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.kernels.cpu.attention import NAME, STRETCH, Form, Writer
from serve_app.kernels.cpu.compiling import Kernel, float_bits, tried
from serve_app.kernels.forms import Stretch

SHORT = 1 << 15
"""Numbers of keys, counted for each head that sees them, that one thread reads sooner than it wakes another."""
ITEMS = 2048
"""Of a call, at most, if it has several rows. What those of divided rows leave is 7.6 MB with two key heads of 64 that
seven query heads share each, and 34 MB with eight of 128 that four share."""
TRIED_LENGTHS = (1, 70, 1100)
"""Keys of the rows that a kernel is tried with: a part of a block, more than one, more than two stretches."""
TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 5e-3, torch.float32: 1e-4}
"""Of results that are about one, by which it may differ from torch's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One query: which packed token it is, and its keys, from a position in the step's slots on."""

    token: int
    position: int
    num_keys: int


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
        self._kernel = Kernel(Writer(form).write(), NAME)
        self._parts = form.parts
        self._partial = form.partial

    @staticmethod
    def lay(stretches: Sequence[Stretch]) -> list[Table]:
        """Return each query in tables of so many items that what their parts leave stays small, long as they may be."""
        groups: list[list[Row]] = [[]]
        num_items = 0
        for each in stretches:
            for number, (begin, end) in enumerate(each.bounds):
                own = -(-(end - begin) // STRETCH)
                if groups[-1] and num_items + own > ITEMS:
                    groups.append([])
                    num_items = 0
                groups[-1].append(Row(token=each.token + number, position=each.position + begin, num_keys=end - begin))
                num_items += own
        return [Table(group) for group in groups]

    def run(
        self, query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Table, output: Tensor, *, scale: float
    ) -> None:
        """Write the results of what was laid to its tokens of the output.

        query, output: [tokens, heads, dim];  keys, values: [slots, kv_heads, dim], contiguous
        slots: int64, where among those the keys are
        """
        partial, ended = table.left(keys.shape[1] * self._parts, self._partial)
        given = table.items, partial.data_ptr(), ended.data_ptr()
        is_short = table.num_keys * query.shape[1] * query.shape[2] <= SHORT
        attend(self._kernel, query, keys, values, slots, output, *given, scale=scale, is_short=is_short)


def attend(
    kernel: Kernel,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    output: Tensor,
    items: Tensor,
    *others: int,
    scale: float,
    is_short: bool,
) -> None:
    """Call a kernel of attention.  others: parameters behind the items"""
    query = query if query.stride()[1:] == (query.shape[2], 1) else query.contiguous()
    num_heads = keys.shape[1]
    kernel(
        len(items), num_heads, query.data_ptr(), query.stride(0), output.data_ptr(), keys.data_ptr(),
        values.data_ptr(), slots.data_ptr(), num_heads * query.shape[2], float_bits(scale * math.log2(math.e)),
        items.data_ptr(), *others, is_short=is_short,
    )  # fmt: skip


@functools.cache
def rows_kernel(group: int, dim: int, dtype: torch.dtype) -> RowsKernel | None:
    """Return the kernel for heads of that size, `group` of which share a key head; None if there is none.

    It takes half a second to make, and is tried beside torch before it is used.
    """
    form = Form.here(group, dim, dtype)
    if form is None:
        return None
    what, trial = f"attention of {group} heads of {dim} in {dtype}", Trial.drawn(group, dim, dtype, TRIED_LENGTHS)
    return tried(what, lambda: RowsKernel(form), trial.is_right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Queries side by side with which a kernel is tried.

    keys, values: those that are seen;  slots: where they are for the kernel
    ends: how many each query sees;  seen: [queries, keys], the same
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    ends: Sequence[int]
    seen: Tensor

    @classmethod
    def drawn(cls, group: int, dim: int, dtype: torch.dtype, ends: Sequence[int]) -> Trial:
        draw, count = torch.Generator().manual_seed(0), max(ends)
        query = torch.randn(len(ends), group * 2, dim, generator=draw).to(dtype)
        keys, values = torch.randn(2, count, 2, dim, generator=draw).to(dtype)
        slots = torch.randperm(count, generator=draw)
        seen = torch.arange(count) < torch.tensor(ends)[:, None]
        return cls(query=query, keys=keys, values=values, slots=slots, ends=ends, seen=seen)

    def is_right(self, kernel: Any) -> bool:
        limit, expected = TOLERANCES[self.query.dtype], self.by_torch(torch.float32)
        return torch.allclose(self.computed_by(kernel)().float(), expected, rtol=limit, atol=limit)

    def computed_by(self, kernel: Any) -> Callable[[], Tensor]:
        """Return what has a kernel compute it, a `RowsKernel` or one for prompts."""
        output, bounds = torch.zeros_like(self.query), [(0, end) for end in self.ends]
        [laid] = kernel.lay([Stretch(token=0, position=0, bounds=bounds)])
        keys, values = (torch.empty_like(each).index_copy_(0, self.slots, each) for each in (self.keys, self.values))

        def compute() -> Tensor:
            scale = self.query.shape[2] ** -0.5
            kernel.run(self.query, keys, values, self.slots, laid, output, scale=scale)
            return output

        return compute

    def by_torch(self, dtype: torch.dtype | None = None) -> Tensor:
        query, keys, values = (
            part.to(dtype or part.dtype).transpose(0, 1)[None] for part in (self.query, self.keys, self.values)
        )
        found = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.seen, enable_gqa=True)
        return found[0].transpose(0, 1)
