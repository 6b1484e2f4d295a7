"""A replica as Serve holds it: Serve gives it requests once its constructor has returned."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest
import ray
from ray import serve

from serve_app.deployments import model
from serve_app.deployments.model import Model
from tests.fakes import FakeBackend, model_card, replica_card, settle


class Cold(FakeBackend):
    """A service that is warm as soon as the test says so."""

    def __init__(self) -> None:
        super().__init__(replica_card("r", model_card()))
        self.is_warm = asyncio.Event()
        self.is_started = False

    def start(self) -> None:
        self.is_started = True

    async def warm(self) -> None:
        assert self.is_started
        await self.is_warm.wait()


class Held(Model):
    def __del__(self) -> None:  # type: ignore[override]
        """Do nothing: Serve awaits what this stands for."""


async def begun(service: Cold, rank: int, monkeypatch: pytest.MonkeyPatch) -> asyncio.Task[None]:
    """Return the constructor of the replica of this rank as it runs, once it waits for nothing but warmth."""
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r"), rank=SimpleNamespace(rank=rank))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(model, "exempt_what_is_loaded", lambda: None)  # which is for the life of a process
    monkeypatch.setattr(model, "let_torch_have_cpus", lambda: None)
    made = Held.__new__(Held)
    constructing = asyncio.create_task(made.__init__(lambda replica_id: service))  # type: ignore[misc]
    async with asyncio.timeout(60):
        while not service.is_started:  # noqa: ASYNC110 # in a thread
            await asyncio.sleep(0.001)
    await settle()
    return constructing


async def test_a_replica_beside_others_takes_requests_only_when_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cold()
    constructing = await begun(service, 1, monkeypatch)
    assert not constructing.done()
    service.is_warm.set()
    await asyncio.wait_for(constructing, 60)


async def test_the_first_replica_takes_requests_while_it_warms(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Cold()
    await asyncio.wait_for(await begun(service, 0, monkeypatch), 60)
    assert not service.is_warm.is_set()
    service.is_warm.set()


@pytest.mark.parametrize(
    ("set_aside", "said", "threads"),
    [
        ({"CPU": 0.4}, "1", "6"),
        ({}, "1", "6"),
        ({"CPU": 0.4}, "3", "3"),
        ({"CPU": 1.0}, "1", "1"),
        ({"CPU": 0.4, "GPU": 1.0}, "1", "1"),
    ],
)
def test_a_part_of_a_cpu_is_no_bound_on_threads(
    set_aside: dict[str, float], said: str, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_assigned_resources=lambda: set_aside))
    monkeypatch.setattr(model, "num_cpus_of_ray", lambda: 6.0)
    model.let_torch_have_cpus()
    assert os.environ["OMP_NUM_THREADS"] == threads
