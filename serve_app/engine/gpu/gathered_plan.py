"""Attention of single queries over pages in torch's operations, by tensors of which the host reads nothing.

The reference of what graphs compute: what it does depends on the sizes of its tensors alone, never on what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_app.engine.decoder.attention import attend
from serve_app.engine.gpu.tiles import Tiles
from serve_app.engine.kv.plan import Scoring


class GatheredPlan:
    """An `AttentionPlan` of tiles of one query, or none, which gathers all pages that their tables could name.

    keys, values: per layer [blocks, block_size, kv_heads, dim], whose last page stays zeros
    padding: the number of that page
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], tiles: Tiles, *, padding: int) -> None:
        self._keys = keys
        self._values = values
        self._tiles = tiles
        self._padding = padding

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        if key is not None and value is not None:
            self._write(keys, key)
            self._write(values, value)
        rows, tokens, starts, lengths = self._tiles.singles.long()
        tables = self._tiles.tables.index_select(0, rows).long()  # [tiles, blocks]
        attended = attend(
            query.index_select(0, tokens)[:, None],
            keys[tables].flatten(1, 2),
            values[tables].flatten(1, 2),
            mask=_mask(starts, tables.shape[1] * keys.shape[1], scoring, query.dtype),
            scale=scoring.scale,
            softcap=scoring.softcap,
            sinks=scoring.sinks,
        )[:, 0]
        attended = torch.where((lengths > 0)[:, None, None], attended, 0.0)
        output = query.new_zeros(*query.shape[:2], values.shape[-1])
        return output.index_copy_(0, tokens, attended.to(output.dtype))

    def _write(self, pages: Tensor, new: Tensor) -> None:
        """At the tokens' places; of those that have none, zeros into the page of zeros."""
        places = self._tiles.places
        is_written = places >= 0
        targets = torch.where(is_written, places, self._padding * pages.shape[1])
        pages.view(-1, *pages.shape[2:]).index_copy_(0, targets, torch.where(is_written[:, None, None], new, 0.0))


def _mask(starts: Tensor, num_keys: int, scoring: Scoring, dtype: torch.dtype) -> Tensor:
    """[tiles, 1, 1, num_keys]: 0 where a query sees a key, else -inf; starts: [tiles], the queries' positions"""
    keys = torch.arange(num_keys, device=starts.device)
    hidden = keys > starts[:, None]
    if scoring.window is not None:
        hidden |= keys <= (starts - scoring.window)[:, None]
    if scoring.chunk is not None:
        hidden |= keys < (starts - starts % scoring.chunk)[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=starts.device).masked_fill_(hidden, -torch.inf)[:, None, None]
