"""Steps that decode as graphs: launched as a whole, once they were recorded for so many rows.

A graph reads and writes where it was recorded to, so each has tensors of its own, which a step's numbers are copied to;
it is recorded anew when anything else that it reads has moved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from serve_app.engine.decoder.step import Layout, Step
from serve_app.engine.gpu.block_tables import BlockTables
from serve_app.engine.gpu.decode_rows import DecodeRows
from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.lora.plan import ShelfRows
from serve_app.engine.lora.pool import AdapterBank, Standing

logger = logging.getLogger(__name__)

Replay: TypeAlias = Callable[[], Tensor]
Capture: TypeAlias = Callable[[Callable[[], Tensor]], Replay]
"""Records what is computed; what it gives computes the same again, from and into the same tensors."""

WARM_UPS = 2
MOST_ROWS = 512
TOLERANCE = 0.02
"""Of the largest logit: sums in 16 bits may have another order."""


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """rows: what it reads;  standing: the adapters' stacks that it reads"""

    rows: DecodeRows
    replay: Replay
    tables: Tensor
    standing: Standing


class DecodeGraphs:
    """Computes steps in which every row is one token of a sequence, and its logits are wanted.

    compute: the logits of a step, float32; nothing that it launches may depend on numbers of the step
    num_captured: graphs that were recorded, ever since
    """

    def __init__(
        self,
        compute: Callable[[Step], Tensor],
        storage: PageStorage,
        bank: AdapterBank,
        capture: Capture,
        *,
        num_places: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._compute = compute
        self._storage = storage
        self._bank = bank
        self._capture = capture
        self._device = device
        self._sizes = sizes_up_to(min(num_places, MOST_ROWS))
        self._tables = BlockTables(
            num_places=num_places,
            max_blocks=-(-max_model_len // storage.block_size),
            block_size=storage.block_size,
            padding=storage.padding,
            device=device,
        )
        self._graphs: dict[tuple[int, tuple[int, ...]], DecodeGraph] = {}
        self._is_given_up = False
        self.num_captured = 0

    def prepare(self) -> None:
        """Record the graphs of all sizes without adapters, the largest first, as the others fit into its memory."""
        for size in reversed(self._sizes):
            if not self._is_given_up:
                self._graph(size, ())

    def logits(self, layout: Layout, token_ids: Tensor | None = None) -> Tensor | None:
        """The step's logits [rows, vocab] float32, which the next step overwrites; None where it is to be computed
        otherwise.

        token_ids: [rows] int64, on the device, in the place of the layout's
        """
        shelves = self._shelves(layout)
        if shelves is None or self._is_given_up:
            return None
        self._tables.catch_up(layout.readings)
        num_rows = len(layout.token_ids)
        size = next(size for size in self._sizes if size >= num_rows)
        graph = self._graph(size, tuple(sorted(each.rank for each in shelves)))
        if graph is None:
            return None
        graph.rows.fill(layout, shelves)
        if token_ids is not None:
            graph.rows.token_ids[:num_rows].copy_(token_ids)
        return graph.replay()[:num_rows]

    def _shelves(self, layout: Layout) -> tuple[ShelfRows, ...] | None:
        """The adapted rows of a step that a graph may compute; None where none may."""
        num_rows = len(layout.token_ids)
        if num_rows > self._sizes[-1] or len(layout.readings) != num_rows:
            return None
        if layout.logit_rows != list(range(num_rows)):
            return None
        if not any(layout.mixes):
            return ()
        if any(len(mix) > 1 for mix in layout.mixes):
            return None
        return self._bank.rows_of(layout.mixes)

    def _graph(self, size: int, ranks: tuple[int, ...]) -> DecodeGraph | None:
        """Of so many rows with adapters of these shelves; recorded anew where it would read what has moved."""
        known = self._graphs.get((size, ranks))
        if known is not None and known.tables is self._tables.tensor and known.standing.is_so:
            return known
        self._forget_moved()
        with self._bank.standing(ranks) as standing:
            if standing is None:
                return None
            try:
                found = self._captured(size, ranks, standing)
            except Exception as error:  # drivers and compilers of kernels fail in ways of their own
                logger.warning("steps are launched kernel by kernel, as they could not be recorded: %s", error)
                self._is_given_up = True
                self._graphs.clear()
                return None
        self._graphs[size, ranks] = found
        return found

    def _forget_moved(self) -> None:
        """Let the memory of graphs go that nobody may replay."""
        for name, each in list(self._graphs.items()):
            if each.tables is not self._tables.tensor or not each.standing.is_so:
                del self._graphs[name]

    def _captured(self, size: int, ranks: Sequence[int], standing: Standing) -> DecodeGraph:
        rows, tables = DecodeRows(size, ranks=ranks, device=self._device), self._tables.tensor
        step = Step(
            token_ids=rows.token_ids,
            positions=rows.positions,
            places=rows.places,
            logit_rows=torch.arange(size, device=self._device),
            mixes=(((0, 1.0),) if ranks else (),) * size,
            attention=self._storage.plan_tiles(rows.tiles(tables), max_keys=self._tables.max_keys),
        )
        shelf_tiles = rows.shelf_tiles()

        def compute() -> Tensor:
            if not shelf_tiles:
                return self._compute(step)
            with self._bank.running(size, shelf_tiles):
                return self._compute(step)

        replay = self._capture(compute)
        check_same(replay(), compute)
        self.num_captured += 1
        return DecodeGraph(rows, replay, tables, standing)


def check_same(replayed: Tensor, compute: Callable[[], Tensor]) -> None:
    """Compare what a graph gave with the same computed kernel by kernel, from the rows of nobody that are there yet.

    Raises ValueError.
    """
    got, expected = replayed.clone(), compute()
    atol = TOLERANCE * float(expected.abs().max())
    if not torch.allclose(got, expected, rtol=TOLERANCE, atol=atol, equal_nan=True):
        most = (got - expected).abs().max()
        raise ValueError(f"what was recorded differs from what is computed, by up to {most:.3g}")


class CudaCapture:
    """Records CUDA graphs, which share their memory, as one at a time is replayed."""

    def __init__(self) -> None:
        self._pool: Any = None  # a handle, of a type that torch keeps to itself

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        own, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(own)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):  # kernels are compiled, libraries take their memory
                compute()
        own.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = compute()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 4, 8, 16, then half steps between powers of two, up to the first that is enough."""
    sizes = [1]
    while sizes[-1] < most:
        last = sizes[-1]
        is_power = last & (last - 1) == 0
        sizes.append(last * 2 if last < 16 else last * 3 // 2 if is_power else last * 4 // 3)
    return sizes
