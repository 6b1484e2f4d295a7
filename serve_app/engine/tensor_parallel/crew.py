"""The followers of a replica's first shard: processes of its own that compute the other shards."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from serve_app.core.errors import EngineFailed
from serve_app.core.machine import command, variables
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.errors import ModelNotSupported
from serve_app.engine.decoder.step import Layout
from serve_app.engine.tensor_parallel.orders import Answer, Compute, Deed, Join, Load, Order
from serve_app.engine.tensor_parallel.sums import Sums

TIMEOUT_S = 120.0
"""So late a shard may be for a sum, as long as the driver lets a step take."""
FOLLOWER = "serve_app.engine.tensor_parallel.follower"
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
