"""A tensor-parallel worker process: computes its shard of every step until rank 0 ends."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import torch
from transformers.utils.logging import disable_progress_bar

from serve_app.core.machine import give_way
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import LoadedModel, load_model
from serve_app.engine.decoder.memory import settle_memory
from serve_app.engine.decoder.runner import Runner
from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.engine.kv.storage import Storage
from serve_app.engine.kv.store import make_store
from serve_app.engine.lora.adapter import Adapter
from serve_app.engine.lora.registration import bind_adapters, probe_slot
from serve_app.engine.tensor_parallel.adapters import WorkerBank
from serve_app.engine.tensor_parallel.workers import (
    AdmitAdapter,
    Answer,
    Bind,
    BringAdapter,
    Collectives,
    Compute,
    DropAdapter,
    Join,
    Load,
    Serve,
    TryAdapter,
)

logger = logging.getLogger(__name__)

GIVEN_UP = 3
"""The exit status of a worker that could not do what it was told."""


class Worker:
    """Carries out orders, one after the other. It ends if an order fails."""

    def __init__(self, leader: Connection) -> None:
        self._leader = leader
        leader.send(Answer())  # everything that takes time to be imported is there
        join: Join = leader.recv()
        self.number, self.count = join.number, join.count
        device = torch.device(join.device)
        self._is_on_cpu = device.type == "cpu"
        if self._is_on_cpu:
            torch.set_num_threads(join.threads)
        self.sums = Collectives(
            join.meeting_place, number=join.number, count=join.count, device=device, timeout_s=join.timeout_s
        )
        self._config: EngineConfig
        self._model: LoadedModel
        self._bound: list[Adapter] = []
        self._storage: Storage
        self._bank: WorkerBank
        self._runner: Runner

    def meet(self) -> None:
        self._leader.send(Answer())
        self._leader.recv()

    def run(self) -> None:
        """Carry out orders until the first shard's process ends."""
        while True:
            try:
                order = self._leader.recv()
            except (EOFError, ConnectionError):
                return
            match order:
                case Load(config=config):
                    self._config, self._bound = config, []
                    if self._is_on_cpu:
                        give_way(config.step_niceness)
                    self._model = load_model(config, peers=self)
                case Bind(records=records):
                    self._bound, _ = bind_adapters(records, self._model.module, shard=self._model.shard)
                case Serve(versions=versions):
                    self._make_ready(versions)
                case AdmitAdapter(adapter=adapter):
                    if self._bank.add([adapter]):
                        self._runner.renew()
                case BringAdapter():
                    self._bank.receive(order)
                case TryAdapter(slot=slot):
                    with self._runner.by_itself():
                        probe_slot(self._model.module, self._bank, slot, self._bank.received, shard=self._model.shard)
                case DropAdapter(version=version):
                    self._bank.drop(version)
                case Compute(calls=calls, layout=layout, by_modules=by_modules):
                    for call in calls:
                        getattr(self._storage, call.method)(*call.arguments)
                    self._runner.run_shard(layout, by_modules=by_modules)

    def refuse(self, reason: str) -> None:
        """Tell the first shard why this worker ends."""
        with suppress(OSError):
            self._leader.send(Answer(refusal=f"shard {self.number} of {self.count}: {reason}"))

    def _make_ready(self, versions: tuple[str, ...]) -> None:
        bound = [adapter for adapter in self._bound if adapter.version in versions]
        if len(bound) < len(versions):
            raise ModelNotSupported("an adapter is not here that the first shard has")
        model = self._model
        self._bank = WorkerBank(model.module, bound, max_slots=self._config.max_adapters, uses_triton=model.uses_triton)
        self._storage = make_store(self._config, model).storage
        self._runner = Runner(model, self._storage, self._bank)
        model.downcast.start()


def main() -> None:
    """Take orders from the first shard over the socket that is this process's input."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the first shard says when it is time
    threading.Thread(target=_end_with_the_leader, daemon=True).start()
    settle_memory()
    disable_progress_bar()  # the first shard's says how far loading is
    with Connection(os.dup(0)) as leader:
        worker = Worker(leader)
        try:
            worker.run()
            os._exit(0)
        except ModelNotSupported as error:
            worker.refuse(str(error))
        except Exception as error:
            logger.exception("shard %d of %d gives up", worker.number, worker.count)
            worker.refuse(f"{type(error).__name__}: {error}")
    os._exit(GIVEN_UP)


def _end_with_the_leader() -> None:
    """End this process with the first shard's, whatever it does; a sum would wait longer."""
    poll = select.poll()
    poll.register(0, 0)  # nothing but its being hung up
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
