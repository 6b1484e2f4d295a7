"""The followers of a replica's first shard: processes of its own that compute the other shards."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol, TypeAlias

import torch
from safetensors.torch import load, save
from torch import Tensor

from serve_app.core.cards import AdapterRecord
from serve_app.core.errors import EngineFailed
from serve_app.core.machine import command, variables
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.errors import ModelNotSupported
from serve_app.engine.decoder.step import Layout
from serve_app.engine.kv.groups import Group, Reading
from serve_app.engine.kv.plan import AttentionPlan
from serve_app.engine.kv.storage import Holding, Storage
from serve_app.engine.lora.adapter import LowRank
from serve_app.engine.tensor_parallel.collectives import Sums
from serve_app.engine.tensor_parallel.division import Division

Call: TypeAlias = Literal["bring", "copy", "claim", "keep", "vacate", "discard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The first order: which shard this one is, and where sums are found; see `Sums`."""

    number: int
    count: int
    meeting_place: str
    device: str
    threads: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load this shard of a model, in the place of one that there was."""

    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """Bind and probe these adapters."""

    records: tuple[AdapterRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Make ready for steps. versions: of the adapters that the first shard has bound"""

    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bring:
    """Compute rows of this slot with an adapter. weights: the shard's part, as `packed` makes them"""

    slot: int
    version: str
    weights: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """What the ledger had a storage do."""

    call: Call
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Carry these deeds out, then compute a step. by_modules: by those that transformers wrote"""

    deeds: tuple[Deed, ...]
    layout: Layout
    by_modules: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of a shard that others wait for. refusal: why the model is not loaded; None where all is well"""

    refusal: str | None = None


Order: TypeAlias = Join | Load | Bind | Serve | Bring | Compute


def packed(weights: Mapping[str, LowRank]) -> bytes:
    """What an adapter does to modules, in one piece. Gains are not among it."""
    tensors = {f"down {name}": each.down.contiguous() for name, each in weights.items()}
    return save(tensors | {f"up {name}": each.up.contiguous() for name, each in weights.items()})


def unpacked(data: bytes) -> dict[str, LowRank]:
    """Undo `packed`."""
    tensors = load(data)
    names = [name.removeprefix("up ") for name in tensors if name.startswith("up ")]
    return {name: LowRank(down=tensors[f"down {name}"], up=tensors[f"up {name}"]) for name in names}


TIMEOUT_S = 120.0
"""So late a shard may be for a sum, as long as the driver lets a step take."""
FOLLOWER = "serve_app.engine.tensor_parallel.worker"
END_S = 10.0


class Crew:
    """Starts the followers, tells them what to do, and ends them.

    Who has a crew is shard 0. `check` may be called by any thread, all else belongs to the one that loads and steps.

    count: of shards, this one included;  sums: with the followers
    """

    number = 0

    def __init__(self, count: int, device: torch.device, *, threads: int | None = None, timeout_s: float = TIMEOUT_S):
        """threads: of torch, for each shard; None is an equal part. Raises ModelNotSupported."""
        self.count = count
        self._deeds: list[Deed] = []
        self._failure: str | None = None
        self._folder = TemporaryDirectory(prefix="serve_app-shards-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        if threads is None and device.type == "cpu":
            threads = max(1, torch.get_num_threads() // count)
            torch.set_num_threads(threads)
        place = str(Path(self._folder.name) / "sums")
        try:
            for number in range(1, count):
                join = Join(
                    number=number,
                    count=count,
                    meeting_place=place,
                    device=str(device) if device.type == "cpu" else f"{device.type}:{number}",
                    threads=threads or 1,
                    timeout_s=timeout_s,
                )
                self._start(join)
            self._await_answers()
            own = device if device.type == "cpu" else torch.device(device.type, 0)
            self.sums = Sums(place, number=0, count=count, device=own, timeout_s=timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, order: Order) -> None:
        """Have every follower carry this out, after all it was told before. Raises EngineFailed."""
        for number in range(1, self.count):
            self.tell_one(number, order)

    def tell_one(self, number: int, order: Order) -> None:
        """The same of one follower."""
        try:
            self._connections[number - 1].send(order)
        except OSError as error:
            self._fail(f"shard {number} of {self.count} takes no orders any more")
            raise EngineFailed(self._failure or "") from error

    def load(self, config: EngineConfig) -> None:
        """Have every follower load its shard of a model, in the place of what it had."""
        self._deeds.clear()
        self.tell(Load(config=config))

    def meet(self) -> None:
        """Wait until every follower has come as far. Raises ModelNotSupported."""
        self._await_answers()
        for connection in self._connections:
            connection.send(Answer())

    def note(self, deed: Deed) -> None:
        """To be carried out by the followers before their next step."""
        self._deeds.append(deed)

    @contextmanager
    def computing(self, layout: Layout, *, by_modules: bool) -> Iterator[None]:
        """Within it the followers compute this step, too. Whatever fails there leaves no crew to go on with."""
        self.check()
        deeds, self._deeds = tuple(self._deeds), []
        self.tell(Compute(deeds=deeds, layout=layout, by_modules=by_modules))
        try:
            yield
        except BaseException:
            self._fail(f"a step failed that {self.count} shards were computing")
            raise

    def check(self) -> None:
        """Raise EngineFailed where a follower is gone, or a step has failed that they were computing."""
        for number, process in enumerate(self._processes, 1):
            if (status := process.poll()) is not None:
                self._fail(f"shard {number} of {self.count} has ended with status {status}")
        if self._failure is not None:
            raise EngineFailed(f"The model cannot be computed any more: {self._failure}.")

    def last_words(self) -> str | None:
        """Why a follower has given up, where one has said so."""
        for connection in self._connections:
            try:
                while connection.poll():
                    answer: Answer = connection.recv()
                    if answer.refusal is not None:
                        return answer.refusal
            except (EOFError, OSError):
                continue
        return None

    def close(self) -> None:
        """End every follower and wait for it."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._processes and hasattr(self, "sums"):
            self.sums.close()
        self._fail("it was closed")
        self._folder.cleanup()

    def _start(self, join: Join) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                command(FOLLOWER),
                stdin=theirs.fileno(),
                # its threads sleep at once: nobody looks there at what others use of the CPUs
                env=variables() | {"GOMP_SPINCOUNT": "0"},
            )
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))
        self._connections[-1].send(join)

    def _await_answers(self) -> None:
        for number, connection in enumerate(self._connections, 1):
            try:
                answer: Answer = connection.recv()
            except (EOFError, OSError) as error:
                raise ModelNotSupported(f"shard {number} of {self.count} ended while the model was loaded") from error
            if answer.refusal is not None:
                raise ModelNotSupported(answer.refusal)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason


class Mates(Protocol):
    """The other shards, as a process that loads has them."""

    @property
    def number(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def sums(self) -> Sums: ...

    def meet(self) -> None:
        """Wait, without a bound, until all have come as far: to read weights takes its time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """crew: the first shard's followers; None where this is one of them"""

    division: Division
    sums: Sums
    crew: Crew | None


class MirroredStorage:
    """The first shard's `Storage`. What each call does is noted; reading and writing are each shard's own affair.

    note: takes a deed, to be carried out by the others before their next step
    """

    def __init__(self, own: Storage, note: Callable[[Deed], None]) -> None:
        self._own = own
        self._note = note
        self.shares_held = own.shares_held
        self.piece_blocks = own.piece_blocks

    def bring(self, holding: Holding, first: int, blocks: Sequence[int]) -> None:
        self._own.bring(holding, first, blocks)
        self._note(Deed(call="bring", arguments=(_copy(holding), first, [*blocks])))

    def copy(self, source: Holding, target: Holding, begin: int, end: int) -> None:
        self._own.copy(source, target, begin, end)
        self._note(Deed(call="copy", arguments=(_copy(source), _copy(target), begin, end)))

    def claim(self, holding: Holding, blocks: Sequence[int]) -> None:
        self._own.claim(holding, blocks)
        self._note(Deed(call="claim", arguments=(_copy(holding), [*blocks])))

    def keep(self, holding: Holding, indices: Sequence[int]) -> None:
        self._own.keep(holding, indices)
        self._note(Deed(call="keep", arguments=(_copy(holding), [*indices])))

    def vacate(self, holding: Holding, first: int = 0) -> None:
        self._own.vacate(holding, first)
        self._note(Deed(call="vacate", arguments=(_copy(holding), first)))

    def discard(self, blocks: Sequence[int]) -> None:
        self._own.discard(blocks)
        self._note(Deed(call="discard", arguments=([*blocks],)))

    def places(self, holding: Holding, begin: int, end: int) -> Sequence[int]:
        return self._own.places(holding, begin, end)

    def plan(self, readings: Sequence[Reading], places: Tensor) -> AttentionPlan:
        return self._own.plan(readings, places)

    def groups(self, readings: Sequence[Reading]) -> list[Group]:
        return self._own.groups(readings)

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        self._own.write(layer, places, key, value)

    def read(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        return self._own.read(layer, group)


def carry_out(deed: Deed, storage: Storage) -> None:
    """Have another storage do the same."""
    getattr(storage, deed.call)(*deed.arguments)


def _copy(holding: Holding) -> Holding:
    """As it is now; whose prefix it begins with is the ledger's affair."""
    return Holding(holding.place, blocks=[*holding.blocks])
