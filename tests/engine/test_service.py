"""The replica's service: frames, refusals, aborts, leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from serve_app.core.cards import AdapterCard
from serve_app.core.delta import Delta, FinishReason
from serve_app.core.errors import AdapterNotFound, ContextOverflow, InvalidRequest, Overloaded
from serve_app.core.names import ModelRef
from serve_app.core.request import GenerationRequest, Prompt, StopParams
from serve_app.engine.loading import ModelNotSupported
from serve_app.engine.service import ModelService
from tests.engine.conftest import DEMO
from tests.engine.harness import config, request


@pytest.fixture
async def service() -> AsyncIterator[ModelService]:
    made = ModelService.load(config(DEMO, max_num_sequences=4, max_waiting=4), replica_id="r1")
    made.start()
    yield made
    await made.close()


def text_request(name: str, text: str = "Once upon a time", **changes: object) -> GenerationRequest:
    asked = replace(request(name, max_tokens=8), prompt=Prompt(parts=(text,)))
    return replace(asked, **changes)  # type: ignore[arg-type]


class Reader:
    """Collects a router's deltas."""

    def __init__(self, service: ModelService, router_id: str = "router") -> None:
        self.deltas: list[Delta] = []
        self._news = asyncio.Event()
        self._frames = service.attach(router_id)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for frame in self._frames:
            self.deltas += frame.deltas
            self._news.set()

    async def wait(self, is_there: Callable[[list[Delta]], bool]) -> list[Delta]:
        async with asyncio.timeout(30):
            while not is_there(self.deltas):
                self._news.clear()
                await self._news.wait()
        return self.deltas

    async def ended(self) -> None:
        await self._task

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._frames.aclose()


async def attached(service: ModelService, router_id: str = "router") -> Reader:
    reader = Reader(service, router_id)
    await asyncio.sleep(0)
    return reader


async def idle(service: ModelService) -> None:
    async with asyncio.timeout(30):
        while service._engine.has_work or service._live:  # noqa: ASYNC110, the engine runs in another thread
            await asyncio.sleep(0.01)


def endings(deltas: list[Delta]) -> int:
    return sum(delta.finish is not None or delta.error is not None for delta in deltas)


async def test_a_submitted_request_comes_back_over_the_attached_stream(service: ModelService) -> None:
    reader = await attached(service)
    await service.submit("router", [text_request("a", n=2), text_request("b")])
    deltas = await reader.wait(lambda seen: endings(seen) == 3)
    assert {(delta.request_id, delta.sample) for delta in deltas} == {("a", 0), ("a", 1), ("b", 0)}
    assert all(delta.finish.reason in FinishReason for delta in deltas if delta.finish is not None)
    assert service._live == {}
    await reader.close()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": Prompt(parts=((10**6,),))}, InvalidRequest, "1000000"),
        ({"prompt": Prompt(parts=(tuple([50] * 5000),))}, ContextOverflow, "5000 tokens"),
        ({"model": ModelRef(base="toy", adapter="ghost", version="1")}, AdapterNotFound, "ghost"),
        ({"n": 99}, Overloaded, "100 more completions"),
    ],
)
async def test_a_refused_request_starts_nothing_of_its_batch(
    service: ModelService, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    reader = await attached(service)
    with pytest.raises(error, match=message):
        await service.submit("router", [text_request("good"), text_request("bad", **changes)])
    assert service._live == {}
    assert not service._engine.has_work
    await reader.close()


async def test_what_was_submitted_before_the_stream_came_is_kept_for_it(service: ModelService) -> None:
    await service.submit("router", [text_request("early")])
    await idle(service)
    reader = await attached(service)
    assert endings(await reader.wait(lambda seen: endings(seen) == 1)) == 1
    await reader.close()


async def test_a_second_stream_of_a_router_ends_the_first(service: ModelService) -> None:
    first, second = await attached(service), await attached(service)
    async with asyncio.timeout(5):
        await first.ended()
    await service.submit("router", [text_request("a")])
    await second.wait(lambda seen: endings(seen) == 1)
    await second.close()


async def test_abort_frees_everything_and_no_delta_follows(service: ModelService) -> None:
    reader = await attached(service)
    long = StopParams(max_tokens=None)
    await service.submit("router", [text_request("a", stop=long, n=2), text_request("b", stop=long)])
    await reader.wait(lambda seen: len(seen) > 3)
    await service.abort("router", ["a", "unknown"])
    await service.abort("router", ["b"])
    count = len(reader.deltas)
    await idle(service)
    assert service._engine.load.num_free_blocks == service._engine.load.num_blocks
    async with asyncio.timeout(10):
        while service.card.load.num_running:  # noqa: ASYNC110, what it says of itself follows
            await asyncio.sleep(0.01)
    assert len(reader.deltas) == count
    await reader.close()


async def test_leaving_the_stream_aborts_what_was_submitted(service: ModelService) -> None:
    reader = await attached(service)
    await service.submit("router", [text_request("a", stop=StopParams(max_tokens=None))])
    await reader.wait(lambda seen: len(seen) > 2)
    await reader.close()
    await idle(service)
    assert service._engine.load.num_running == 0


async def test_a_router_cannot_abort_for_another(service: ModelService) -> None:
    reader, other = await attached(service), await attached(service, "other")
    await service.submit("router", [text_request("a")])
    await service.abort("other", ["a"])
    await reader.wait(lambda seen: endings(seen) == 1)
    assert other.deltas == []
    await reader.close()
    await other.close()


async def test_a_router_that_falls_silent_loses_its_requests() -> None:
    service = ModelService.load(config(DEMO, lease_s=0.2), replica_id="r1")
    service.start()
    reader = await attached(service)
    await service.submit("router", [text_request("a", stop=StopParams(max_tokens=None))])
    async with asyncio.timeout(10):
        await reader.ended()
    assert service._live == {}
    await idle(service)
    assert service._engine.load.num_running == 0
    await service.close()


async def test_an_adapter_that_does_not_fit_is_listed_with_its_reason_and_stops_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "adapter_config.json").write_text("{}")
    card = AdapterCard(name="broken", version="1", root=str(folder))
    service = ModelService.load(config(DEMO), [card], replica_id="r1")
    service.start()
    listed = service.card.model.adapters[0]
    assert not listed.is_usable
    assert "adapter_model.safetensors" in (listed.reason or "")
    await service.close()


def test_a_model_with_an_unsupported_part_is_refused_by_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    import json
    import shutil

    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    settings = json.loads((folder / "config.json").read_text())
    settings["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelNotSupported, match="rope_type longrope"):
        ModelService.load(config(folder), replica_id="r1")
