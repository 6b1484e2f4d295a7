"""Steps by graphs where there is no GPU: attention over tensors that are filled anew for every step, by torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.decoder.runner import Runner
from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.kv.storage import AttentionPlan, Slots, Storage, attend, mask_of
from serve_app.engine.lora.pool import AdapterBank
from serve_app.kernels.forms import Scoring, Tiles


class GatheringRunner(Runner):
    """A runner whose graphs gather pages, as Triton's kernels follow block tables on GPUs alone."""

    def __init__(self, model: LoadedModel, storage: Storage, bank: AdapterBank) -> None:
        super().__init__(model, GatheringStorage(storage), bank)


class GatheringStorage(PageStorage):
    """Another's pages."""

    def __init__(self, own: Storage) -> None:
        self.__dict__ = own.__dict__

    def plan_tiles(self, tiles: Tiles, *, max_keys: int) -> AttentionPlan:
        return GatheredPlan(self._slots, tiles, padding=self.padding)


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    """An `AttentionPlan` of tiles of one query, or none, which gathers all pages that their tables could name.

    layers:  of each its keys and its values, of which the last page stays zeros
    padding: the number of that page
    """

    layers: Sequence[tuple[Slots, Slots]]
    tiles: Tiles
    padding: int

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        slots = self.layers[layer]
        if key is not None and value is not None:
            for each, new in zip(slots, (key, value), strict=True):
                self._write(each, new)
        keys, values = (each.pages for each in slots)
        rows, tokens, starts, lengths = self.tiles.singles.long()
        tables = self.tiles.tables.index_select(0, rows).long()  # [tiles, blocks]
        num_keys = tables.shape[1] * keys.shape[1]
        attended = attend(
            query.index_select(0, tokens)[:, None],
            keys[tables].flatten(1, 2),
            values[tables].flatten(1, 2),
            mask=mask_of(starts, 1, num_keys, window=scoring.window, chunk=scoring.chunk, dtype=query.dtype),
            scale=scoring.scale,
            softcap=scoring.softcap,
            sinks=scoring.sinks,
        )[:, 0]
        attended = torch.where((lengths > 0)[:, None, None], attended, 0.0)
        output = query.new_zeros(*query.shape[:2], values.shape[-1])
        return output.index_copy_(0, tokens, attended.to(output.dtype))

    def _write(self, slots: Slots, new: Tensor) -> None:
        """At the tokens' places; of those that have none, zeros into the page of zeros."""
        places = self.tiles.places
        is_written = places >= 0
        targets = torch.where(is_written, places, self.padding * slots.pages.shape[1])
        slots.write(targets, torch.where(is_written[:, None, None], new, 0.0))
