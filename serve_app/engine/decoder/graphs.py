"""CUDA graphs of decode-only steps, captured once for each number of rows and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from serve_app.engine.decoder.memory import send_into, sent
from serve_app.engine.decoder.step import Layout, Step
from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.kv.storage import Reading
from serve_app.engine.lora.plan import ShelfRows
from serve_app.engine.lora.pool import AdapterBank, Standing
from serve_app.kernels.forms import AdapterTiles, Tiles

logger = logging.getLogger(__name__)


class BlockTables:
    """Rows by place. A holding's blocks are only ever appended to, and another holding has a list of its own.

    It has room for the longest context from the start, as graphs read it where it is: 4 bytes for each block.

    tensor: [places, blocks] int32
    """

    def __init__(
        self, *, num_places: int, max_blocks: int, block_size: int, padding: int, device: torch.device
    ) -> None:
        self._known: dict[int, tuple[Sequence[int], int]] = {}
        self.max_keys = max_blocks * block_size
        self.tensor = torch.full((num_places, max_blocks), padding, dtype=torch.int32, device=device)

    @property
    def width(self) -> int:
        return self.tensor.shape[1]

    def catch_up(self, readings: Sequence[Reading]) -> None:
        """Bring the rows of these up to date."""
        at: list[int] = []
        numbers: list[int] = []
        for each in readings:
            blocks, count = self._known.get(each.place, (each.blocks, 0))
            begin = count if blocks is each.blocks else 0
            end = len(each.blocks)
            if begin < end:
                first = each.place * self.width
                at += range(first + begin, first + end)
                numbers += each.blocks[begin:end]
                self._known[each.place] = (each.blocks, end)
        if at:
            places, blocks_there = sent(torch.tensor([at, numbers]), self.tensor.device)
            self.tensor.view(-1).index_copy_(0, places, blocks_there.to(torch.int32))


NOWHERE = -1
"""The place of a row that nobody has: nothing of it is written, and nothing attended to."""
NOBODY = Layout(token_ids=[], positions=[], places=[], logit_rows=[], mixes=(), readings=())


class DecodeRows:
    """Room for the numbers of `size` rows; those beyond a step's own are nobody's.

    token_ids, positions, places: [size] int64, as in `Step`
    """

    def __init__(self, size: int, *, ranks: Sequence[int], device: torch.device) -> None:
        """ranks: of the shelves whose adapters the rows may have, one adapter each"""
        self.size = size
        self._ranks = tuple(ranks)
        self._wide = torch.empty(3 * size, dtype=torch.int64, device=device)
        self._narrow = torch.empty(size * (4 + 5 * len(ranks)), dtype=torch.int32, device=device)
        self.token_ids, self.positions, self.places = self._wide.view(3, size)
        self.fill()

    def tiles(self, tables: Tensor) -> Tiles:
        """Return a tile of one query for each row; tables: by place"""
        singles, chunks = self._narrow[: 4 * self.size].view(4, self.size), self._narrow[:0].view(4, 0)
        return Tiles(places=self.places, tables=tables, singles=singles, chunks=chunks)

    def shelf_tiles(self) -> tuple[AdapterTiles, ...]:
        """Return the tiles of each rank, as many as there are rows."""
        found = []
        for number, rank in enumerate(self._ranks):
            own = self._narrow[self.size * (4 + 5 * number) : self.size * (9 + 5 * number)].view(5, self.size)
            found.append(AdapterTiles(rank=rank, rows=own[0], factors=own[1].view(torch.float32), tiles=own[2:]))
        return tuple(found)

    def fill(self, layout: Layout = NOBODY, shelves: Sequence[ShelfRows] = ()) -> None:
        """Take a step's numbers, in two copies; the other rows are nobody's. shelves: of some ranks, each once"""
        size, free = self.size, range(len(layout.token_ids), self.size)
        rest = [0] * len(free)
        wide = [*layout.token_ids, *rest, *layout.positions, *rest, *layout.places, *(NOWHERE for _ in free)]
        singles = [(each.place, each.first_token, each.start, 1) for each in layout.readings]
        tiles = [*singles, *((0, row, 0, 0) for row in free)]
        narrow = torch.zeros(4 + 5 * len(self._ranks), size, dtype=torch.int32)
        narrow[:4] = torch.tensor(tiles, dtype=torch.int32).T
        for each in shelves:
            _lay(narrow[4 + 5 * self._ranks.index(each.rank) :][:5], each)
        send_into(self._wide, torch.tensor(wide, dtype=torch.int64))
        send_into(self._narrow, narrow.flatten())


def _lay(own: Tensor, each: ShelfRows) -> None:
    """Put a shelf's rows into [5, size] int32: rows, factors by their bits, tiles; the other tiles are empty."""
    own[0, : len(each.rows)] = torch.tensor(each.rows, dtype=torch.int32)
    own[1, : len(each.factors)] = torch.tensor(each.factors, dtype=torch.float32).view(torch.int32)
    own[2:, : len(each.tiles)] = torch.tensor(each.tiles, dtype=torch.int32).T


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
    standing: Standing


class DecodeGraphs:
    """Computes steps in which every row is one token of a sequence, and its logits are wanted.

    compute: the logits of a step; nothing that it launches may depend on numbers of the step
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
        self._failed: dict[tuple[int, tuple[int, ...]], Standing] = {}
        self._logits: Tensor | None = None  # [rows, vocab] float32, of all graphs, as one at a time is replayed
        self.num_captured = 0

    def prepare(self) -> None:
        """Record the graphs of all sizes, without adapters and with those that are known.

        The largest come first, as the others fit into their memory.
        """
        self._bank.reserve()
        for size in reversed(self._sizes):
            for ranks in {(), self._bank.kernel_ranks}:
                self._graph(size, ranks)

    def logits(self, layout: Layout, token_ids: Tensor | None = None) -> Tensor | None:
        """The step's logits [rows, vocab] float32, which the next step overwrites; None where it is to be computed
        otherwise.

        token_ids: [rows] int64, on the device, in the place of the layout's
        """
        shelves = self._shelves(layout)
        if shelves is None:
            return None
        self._tables.catch_up(layout.readings)
        num_rows = len(layout.token_ids)
        size = next(size for size in self._sizes if size >= num_rows)
        graph = self._graph(size, self._bank.kernel_ranks if shelves else ())
        if graph is None:
            return None
        graph.rows.fill(layout, shelves)
        if token_ids is not None:
            graph.rows.token_ids[:num_rows].copy_(token_ids)
        return graph.replay()[:num_rows]

    def _shelves(self, layout: Layout) -> tuple[ShelfRows, ...] | None:
        """Return the adapted rows of a step that a graph may compute; None if none may."""
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
        """Return the graph of so many rows and ranks. It is captured anew if tensors that it reads have moved."""
        known, failed = self._graphs.get((size, ranks)), self._failed.get((size, ranks))
        if known is not None and known.standing.is_so:
            return known
        if failed is not None and failed.is_so:
            return None
        self._forget_moved()
        with self._bank.standing(ranks) as standing:
            if standing is None:
                return None
            try:
                found = self._captured(size, ranks, standing)
            except Exception as error:  # drivers and compilers of kernels fail in ways of their own
                rows = f"{size} rows{' with adapters' if ranks else ''}"
                logger.warning("steps of %s are launched kernel by kernel, as recording failed: %s", rows, error)
                self._failed[size, ranks] = standing
                return None
        self._graphs[size, ranks] = found
        return found

    def _forget_moved(self) -> None:
        """Let the memory of graphs go that nobody may replay."""
        for name, each in list(self._graphs.items()):
            if not each.standing.is_so:
                del self._graphs[name]

    def _captured(self, size: int, ranks: Sequence[int], standing: Standing) -> DecodeGraph:
        rows, tables = DecodeRows(size, ranks=ranks, device=self._device), self._tables.tensor
        step = Step(
            token_ids=rows.token_ids,
            positions=rows.positions,
            places=rows.places,
            logit_rows=torch.arange(size, device=self._device),
            mixes=((),) * size,  # so that the loop leaves the adapters' tiles to `running`
            attention=self._storage.plan_tiles(rows.tiles(tables), max_keys=self._tables.max_keys),
        )
        shelf_tiles = rows.shelf_tiles()
        if self._logits is None:
            self._logits = torch.empty(self._sizes[-1], self._compute(step).shape[1], device=self._device)
        logits = self._logits[:size]

        def compute() -> Tensor:
            with self._bank.running(size, shelf_tiles) if shelf_tiles else nullcontext():
                return logits.copy_(self._compute(step))

        replay = self._capture(compute)
        check_same(replay(), compute)
        self.num_captured += 1
        return DecodeGraph(rows, replay, standing)


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
