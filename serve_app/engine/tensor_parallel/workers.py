"""Rank 0's view of a replica's tensor-parallel workers: processes, orders and the state of their storage.

The first shard (number 0) schedules, reads files and answers. Each worker computes another shard. For a step the first
shard 1. sends what its block ledger did to the storage since the last step; 2. sends the step's layout; 3. computes its
own shard. Sums meet in `Collectives`.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as distributed
from safetensors.torch import load, save
from torch import Tensor

from serve_app.core.cards import AdapterRecord
from serve_app.core.errors import EngineFailed
from serve_app.core.machine import command, variables
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.step import Layout
from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.engine.kv.storage import Storage
from serve_app.engine.lora.adapter import Adapter, LowRank
from serve_app.engine.tensor_parallel.division import Division

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""All shards are on one machine; no other machine may connect to them."""


class Collectives:
    """One shard's end of the process group; a process has one. All shards ask for the same sums in the same order.

    A sum waits for a late shard up to the time limit.
    """

    def __init__(self, meeting_place: str, *, number: int, count: int, device: torch.device, timeout_s: float) -> None:
        """meeting_place: a path where no file is yet, the same for all shards"""
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)
        self.device = device
        is_cuda = device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl" if is_cuda else "gloo",
            init_method=f"file://{meeting_place}",
            rank=number,
            world_size=count,
            timeout=timedelta(seconds=timeout_s),
        )

    def total(self, part: Tensor) -> Tensor:
        """Replace this shard's part by the sum of all shards' parts, and return it."""
        distributed.all_reduce(part)
        return part

    def least(self, number: int) -> int:
        """Return the least of all shards' numbers."""
        found = torch.tensor(number, dtype=torch.int64, device=self.device)
        distributed.all_reduce(found, distributed.ReduceOp.MIN)
        return int(found)

    def everywhere(self, flags: Tensor) -> Tensor:
        """Return which flags are set in all shards."""
        found = flags.to(torch.int64)
        distributed.all_reduce(found, distributed.ReduceOp.MIN)
        return found.bool()

    def close(self) -> None:
        distributed.destroy_process_group()


def sum_outputs(decoder: Any, sums: Collectives) -> None:
    """Have transformers' modules sum what their attention and their MLP give, adapters' changes included."""
    for layer in decoder.layers:
        layer.self_attn.register_forward_hook(lambda _, __, output: (sums.total(output[0]), *output[1:]))
        layer.mlp.register_forward_hook(lambda _, __, output: sums.total(output))


Method: TypeAlias = Literal["claim", "copy", "discard"]
TIMEOUT_S = 120.0
"""How long a sum waits for a shard; as long as the driver lets a step take."""
WORKER = "serve_app.engine.tensor_parallel.worker"
END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The first order: which shard the worker is, and how it joins the collectives."""

    number: int
    count: int
    meeting_place: str
    device: str
    threads: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load your shard of a model in place of an earlier one."""

    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """Bind and probe these adapters."""

    records: tuple[AdapterRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Get ready for steps. versions: of the adapters that the first shard has bound"""

    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BringAdapter:
    """Put an adapter into a slot. weights: your part of it, as `packed` makes them"""

    slot: int
    version: str
    weights: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitAdapter:
    """Make one more adapter known, as the first shard has bound it."""

    adapter: Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class TryAdapter:
    """Compute a few tokens with the adapter that came last, which is in this slot."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropAdapter:
    """Forget an adapter that is in none of the first shard's slots."""

    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCall:
    """A call of a method that changes a storage."""

    method: Method
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Make these calls, then compute a step. by_modules: by transformers' own modules"""

    calls: tuple[StorageCall, ...]
    layout: Layout
    by_modules: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A worker's answer. refusal: why it did not load the model; None if it did"""

    refusal: str | None = None


Order: TypeAlias = Join | Load | Bind | Serve | AdmitAdapter | BringAdapter | TryAdapter | DropAdapter | Compute


def packed(weights: Mapping[str, LowRank]) -> bytes:
    """Pack an adapter's factors into bytes; gains are not among them."""
    tensors = {f"down {name}": each.down.contiguous() for name, each in weights.items()}
    return save(tensors | {f"up {name}": each.up.contiguous() for name, each in weights.items()})


def unpacked(data: bytes) -> dict[str, LowRank]:
    """Undo `packed`."""
    tensors = load(data)
    names = [name.removeprefix("up ") for name in tensors if name.startswith("up ")]
    return {name: LowRank(down=tensors[f"down {name}"], up=tensors[f"up {name}"]) for name in names}


class Workers:
    """Starts the workers, sends them orders, and ends them.

    Its process is shard 0. Any thread may call `check`; the rest belongs to the thread that loads and steps.

    count: of shards, this one included;  sums: with the workers
    """

    number = 0

    def __init__(self, count: int, device: torch.device, *, threads: int | None = None, timeout_s: float = TIMEOUT_S):
        """threads: of torch, for each shard; None is an equal part. Raises ModelNotSupported."""
        self.count = count
        self._calls: list[StorageCall] = []
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
            self.sums = Collectives(place, number=0, count=count, device=own, timeout_s=timeout_s)
        except BaseException:
            self.close()
            raise

    def tell(self, order: Order) -> None:
        """Send an order to every worker; each carries out its orders in turn. Raises EngineFailed."""
        for number in range(1, self.count):
            self.tell_one(number, order)

    def tell_one(self, number: int, order: Order) -> None:
        """Send an order to one worker. Raises EngineFailed."""
        try:
            self._connections[number - 1].send(order)
        except OSError as error:
            self._fail(f"shard {number} of {self.count} takes no orders any more")
            raise EngineFailed(self._failure or "") from error

    def load(self, config: EngineConfig) -> None:
        """Have every worker load its shard of a model in place of an earlier one."""
        self._calls.clear()
        self.tell(Load(config=config))

    def meet(self) -> None:
        """Wait until every worker has reached this point. Raises ModelNotSupported."""
        self._await_answers()
        for connection in self._connections:
            connection.send(Answer())

    def note(self, call: StorageCall) -> None:
        """Have the workers make this call before their next step."""
        self._calls.append(call)

    @contextmanager
    def computing(self, layout: Layout, *, by_modules: bool) -> Iterator[None]:
        """Have the workers compute a step beside the caller."""
        calls, self._calls = tuple(self._calls), []
        with self.together(Compute(calls=calls, layout=layout, by_modules=by_modules)):
            yield

    @contextmanager
    def together(self, order: Order) -> Iterator[None]:
        """Have the workers carry out an order beside the caller. If that fails, the workers cannot go on."""
        self.check()
        self.tell(order)
        try:
            yield
        except BaseException:
            self._fail(f"a step failed that {self.count} shards were computing")
            raise

    def check(self) -> None:
        """Raise EngineFailed if a worker is gone or a common step has failed."""
        for number, process in enumerate(self._processes, 1):
            if (status := process.poll()) is not None:
                self._fail(f"shard {number} of {self.count} has ended with status {status}")
        if self._failure is not None:
            raise EngineFailed(f"The model cannot be computed any more: {self._failure}.")

    def refusal(self) -> str | None:
        """Return why a worker has given up, if one has said so."""
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
        """End every worker and wait for it."""
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
                command(WORKER),
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


class Peers(Protocol):
    """The other shards, as a process that loads its own sees them."""

    @property
    def number(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def sums(self) -> Collectives: ...

    def meet(self) -> None:
        """Wait until all have reached this point, however long they read weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard of a divided model. workers: of the first shard; None if this process is a worker"""

    division: Division
    sums: Collectives
    workers: Workers | None


class ReplicatedStorage:
    """The first shard's `Storage`, whose changes the workers repeat on theirs. Each shard reads and writes its own.

    note: takes a call that the workers make before their next step
    """

    def __init__(self, own: Storage, note: Callable[[StorageCall], None]) -> None:
        self._own = own
        self._note = note
        self.places, self.plan, self.write, self.read = own.places, own.plan, own.write, own.read

    def claim(self, blocks: Sequence[int]) -> None:
        self._change("claim", [*blocks])

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        self._change("copy", source, target, num_tokens)

    def discard(self, blocks: Sequence[int]) -> None:
        self._change("discard", [*blocks])

    def _change(self, method: Method, *arguments: Any) -> None:
        """Make a call, and have the workers make it."""
        getattr(self._own, method)(*arguments)
        self._note(StorageCall(method=method, arguments=arguments))
