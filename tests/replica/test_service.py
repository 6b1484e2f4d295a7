"""The replica's service: frames, refusals, aborts, pauses, leases."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from serve_app.catalog.adapters import read_adapter
from serve_app.core.delta import Delta, FinishReason
from serve_app.core.errors import AdapterNotFound, ContextOverflow, EngineFailed, InvalidRequest, Overloaded
from serve_app.core.ledger import Spent
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Prompt, TokenizeRequest
from serve_app.core.request import ContextParams, GenerationRequest, StopParams
from serve_app.deployments.loading import load_replica
from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.replica.service import ModelService
from serve_app.replica.tokenizer_pools import POOLS, TokenizerPools
from tests.engine.conftest import DEMO
from tests.engine.harness import config, core_of, request
from tests.fakes import settle

pytestmark = pytest.mark.slow


@pytest.fixture
async def service() -> AsyncIterator[ModelService]:
    made = load_replica(config(DEMO, max_num_sequences=4, max_waiting=4, lease_s=600), replica_id="r1")
    made.start()  # nobody renews a lease here
    yield made
    await made.close()


def text_request(name: str, text: str = "Once upon a time", **changes: object) -> GenerationRequest:
    asked = replace(request(name, max_tokens=8), prompt=Prompt(parts=(text,)))
    return replace(asked, **changes)  # type: ignore[arg-type]


LONG = StopParams(max_tokens=None, ignore_eos=True)
LONG_TEXT = "x" * 4_000_000


class Reader:
    """Collects a router's deltas."""

    def __init__(self, service: ModelService, router_id: str = "router") -> None:
        self.deltas: list[Delta] = []
        self.spent: Spent | None = None
        self._news = asyncio.Event()
        self._frames = service.attach(router_id)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for frame in self._frames:
            self.deltas += frame.deltas
            for each in frame.load.spent:
                self.spent = each
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
        while core_of(service).has_work or service.num_open:  # noqa: ASYNC110, the engine runs in another thread
            await asyncio.sleep(0.01)


def endings(deltas: list[Delta]) -> int:
    return sum(delta.finish is not None or delta.error is not None for delta in deltas)


async def test_what_makes_steps_faster_begins_when_the_service_is_warmed(
    service: ModelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(core_of(service).model.downcast, "start", lambda: begun.append(True))
    await service.warm()
    assert begun == [True]


async def test_a_submitted_request_comes_back_over_the_attached_stream(service: ModelService) -> None:
    reader = await attached(service)
    await service.submit("router", [text_request("a", n=2), text_request("b")])
    deltas = await reader.wait(lambda seen: endings(seen) == 3)
    assert {(delta.request_id, delta.sample) for delta in deltas} == {("a", 0), ("a", 1), ("b", 0)}
    assert all(delta.finish.reason in FinishReason for delta in deltas if delta.finish is not None)
    assert service.num_open == 0
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
    assert service.num_open == 0
    assert not core_of(service).has_work
    await reader.close()


async def test_what_was_submitted_before_the_stream_came_is_kept_for_it(service: ModelService) -> None:
    await service.submit("router", [text_request("early")])
    await idle(service)
    reader = await attached(service)
    assert endings(await reader.wait(lambda seen: endings(seen) == 1)) == 1
    await reader.close()


async def test_a_second_stream_of_a_router_ends_the_first(service: ModelService) -> None:
    first, second = await attached(service), await attached(service)
    async with asyncio.timeout(60):
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
    await settle()  # what was on its way is read
    count = len(reader.deltas)
    await idle(service)
    assert core_of(service).load.num_free_blocks == core_of(service).load.num_blocks
    async with asyncio.timeout(60):
        while service.card.load.num_running:  # noqa: ASYNC110, what it says of itself follows
            await asyncio.sleep(0.01)
    assert len(reader.deltas) == count
    await reader.close()


async def test_what_was_given_up_is_told_to_every_router_with_a_frame_and_waits_for_no_other() -> None:
    """Neither of the two has anything left here."""
    service = load_replica(config(DEMO, lease_s=600), replica_id="r1")
    service.start()
    readers = [await attached(service), await attached(service, "other")]
    await service.submit("router", [text_request("a", stop=StopParams(max_tokens=None))])
    await readers[0].wait(lambda seen: len(seen) > 3)
    await service.abort("router", ["a"])
    await idle(service)
    (flow,) = core_of(service).news(0).spent
    async with asyncio.timeout(60):
        while any(each.spent != flow for each in readers):  # noqa: ASYNC110, what it says follows
            await asyncio.sleep(0.01)
    for reader in readers:
        await reader.close()
    await service.close()


async def test_leaving_the_stream_aborts_what_was_submitted(service: ModelService) -> None:
    reader = await attached(service)
    await service.submit("router", [text_request("a", stop=StopParams(max_tokens=None))])
    await reader.wait(lambda seen: len(seen) > 2)
    await reader.close()
    await idle(service)
    assert core_of(service).load.num_running == 0


async def test_a_router_cannot_abort_for_another(service: ModelService) -> None:
    reader, other = await attached(service), await attached(service, "other")
    await service.submit("router", [text_request("a")])
    await service.abort("other", ["a"])
    await reader.wait(lambda seen: endings(seen) == 1)
    assert other.deltas == []
    await reader.close()
    await other.close()


async def test_a_router_that_falls_silent_loses_its_requests() -> None:
    service = load_replica(config(DEMO, lease_s=0.2), replica_id="r1")
    service.start()
    reader = await attached(service)
    await service.submit("router", [text_request("a", stop=StopParams(max_tokens=None))])
    async with asyncio.timeout(60):
        await reader.ended()
    assert service.num_open == 0
    await idle(service)
    assert core_of(service).load.num_running == 0
    await service.close()


async def test_a_replica_that_was_stalled_keeps_its_routers_and_their_requests() -> None:
    now = [0.0]
    service = load_replica(config(DEMO, lease_s=40), replica_id="r1", clock=lambda: now[0])
    service.start()
    reader = await attached(service)
    await service.submit("router", [text_request("a", stop=LONG)])
    now[0] += 1000
    service.detach_silent()
    assert service.num_open == 1
    for _ in range(5):  # awake again, and the router stays silent
        now[0] += 10
        service.detach_silent()
    await reader.ended()
    assert service.num_open == 0
    await service.close()


async def test_a_paused_request_gives_its_place_to_others_and_goes_on_with_the_same_text(
    service: ModelService,
) -> None:
    reader = await attached(service)
    asked = text_request("whole", stop=StopParams(max_tokens=400, ignore_eos=True))
    await service.submit("router", [asked])
    await reader.wait(lambda seen: endings(seen) == 1)
    await service.submit("router", [replace(asked, request_id="halved")])
    await reader.wait(lambda seen: any(delta.request_id == "halved" for delta in seen))
    await service.pause("router", ["halved", "unknown"])
    await service.submit("router", [text_request(f"other{number}") for number in range(4)])
    deltas = await reader.wait(lambda seen: endings(seen) == 5)
    assert not any(delta.finish for delta in deltas if delta.request_id == "halved")
    async with asyncio.timeout(60):
        while service.card.load.num_running:  # noqa: ASYNC110, what it says of itself follows
            await asyncio.sleep(0.01)
    count = len(reader.deltas)
    await service.resume("router", ["halved"])
    deltas = await reader.wait(lambda seen: endings(seen) == 6)
    assert len(deltas) > count
    texts = {name: "".join(d.text for d in deltas if d.request_id == name) for name in ("whole", "halved")}
    assert texts["whole"] == texts["halved"]
    await reader.close()


async def test_a_request_paused_before_it_was_cut_into_tokens_does_not_start(service: ModelService) -> None:
    reader = await attached(service)
    submission = asyncio.create_task(service.submit("router", [text_request("early")]))
    await asyncio.sleep(0)
    await service.pause("router", ["early"])
    await submission
    await service.submit("router", [text_request("later")])
    deltas = await reader.wait(lambda seen: endings(seen) == 1)
    assert {delta.request_id for delta in deltas} == {"later"}
    await service.resume("router", ["early"])
    await reader.wait(lambda seen: endings(seen) == 2)
    await reader.close()


async def test_a_router_cannot_pause_for_another_and_a_paused_request_can_be_aborted(service: ModelService) -> None:
    reader = await attached(service)
    await service.submit("router", [text_request("a")])
    await service.pause("other", ["a"])
    await reader.wait(lambda seen: endings(seen) == 1)
    await service.submit("router", [text_request("b", stop=LONG)])
    await service.pause("router", ["b"])
    await service.abort("router", ["b"])
    await idle(service)
    load = core_of(service).load
    assert (load.num_running, load.num_waiting, load.num_free_blocks) == (0, 0, load.num_blocks)
    await reader.close()


async def test_a_router_that_never_reads_loses_its_requests_with_an_error_and_no_other_does() -> None:
    service = load_replica(config(DEMO, max_outbox_deltas=8, max_outbox_bytes=3_000), replica_id="r1")
    service.start()
    await service.submit("deaf", [text_request("a", n=2, stop=LONG), text_request("b", stop=LONG)])
    reader = await attached(service)
    await service.submit("router", [text_request("mine")])
    await reader.wait(lambda seen: endings(seen) == 1)
    async with asyncio.timeout(30):
        while service.num_open:  # noqa: ASYNC110, until more was generated than may wait
            await asyncio.sleep(0.01)
    deaf = await attached(service, "deaf")
    deltas = await deaf.wait(lambda seen: endings(seen) == 3)
    assert {(delta.request_id, delta.sample) for delta in deltas} == {("a", 0), ("a", 1), ("b", 0)}
    assert all("did not read" in str(delta.error) and isinstance(delta.error, EngineFailed) for delta in deltas)
    assert reader.deltas[-1].finish is not None
    await idle(service)
    await reader.close()
    await deaf.close()
    await service.close()


async def test_a_fresh_replica_says_what_it_has_before_its_first_step(service: ModelService) -> None:
    card = await service.hello("router")
    assert card.load.num_blocks == core_of(service).load.num_blocks > 0
    assert card.load.num_free_blocks == card.load.num_blocks
    assert (card.model.max_num_sequences, card.model.max_waiting) == (4, 4)
    assert card.model.kv_cache_bytes == 64 << 20


async def test_a_text_to_tokenize_is_bounded_by_the_configuration() -> None:
    service = load_replica(config(DEMO, max_tokenized_chars=100), replica_id="r1")
    service.start()
    assert (await service.tokenize(TokenizeRequest(text="x" * 100))).token_ids
    for name in ("prompt", "content"):
        with pytest.raises(InvalidRequest, match=f'"{name}" must be at most 100 characters .*; found 101') as refusal:
            await service.tokenize(TokenizeRequest(text="x" * 101, param=name))
        assert refusal.value.param == name
    await service.close()


async def with_full_pools(gate: threading.Event) -> tuple[ModelService, list[asyncio.Task[bool]]]:
    """A service whose every tokenizer thread for long texts waits at the gate."""
    pools = TokenizerPools()
    service = load_replica(config(DEMO), replica_id="r1", pools=pools)
    service.start()
    ahead = [asyncio.create_task(pools.run([text_request("ahead", LONG_TEXT)], gate.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    return service, ahead


async def test_what_was_aborted_while_it_waited_is_not_cut_into_tokens() -> None:
    gate = threading.Event()
    service, ahead = await with_full_pools(gate)
    half_characters = "\ud83d" * 600_000  # refused where anybody looks at it
    asked = text_request("gone", half_characters, context=ContextParams(truncates_prompt=True))
    gone = asyncio.create_task(service.submit("router", [asked]))
    kept = asyncio.create_task(service.submit("router", [replace(asked, request_id="kept")]))
    await asyncio.sleep(0)
    await service.abort("router", ["gone"])
    gate.set()
    await gone
    with pytest.raises(InvalidRequest):
        await kept
    await asyncio.gather(*ahead)
    await service.close()


async def test_a_prompt_that_is_too_long_is_refused_at_once_behind_whatever_is_being_cut() -> None:
    gate = threading.Event()
    service, ahead = await with_full_pools(gate)
    async with asyncio.timeout(30):
        with pytest.raises(ContextOverflow, match="has 4000000 characters"):
            await service.submit("router", [text_request("b"), text_request("c", LONG_TEXT)])
    assert service.num_open == 0
    gate.set()
    await asyncio.gather(*ahead)
    await service.close()


@pytest.mark.law("Nobody is held up")
async def test_short_work_passes_long_work() -> None:
    pools, gate = TokenizerPools(), threading.Event()
    sizes = [most + 1 for most, _ in POOLS if most is not None]
    long = [
        asyncio.create_task(pools.run([text_request("long", "x" * size)], gate.wait))
        for size in sizes
        for _ in range(10)
    ]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        for number in range(50):
            assert await pools.run([text_request("short", "x" * 1000)], lambda number=number: number) == number
    assert not any(task.done() for task in long)
    gate.set()
    await asyncio.gather(*long)
    pools.close()


async def test_prompts_in_ids_and_many_prompts_together_count_as_long_work() -> None:
    pools = TokenizerPools()
    names = []
    for parts in (("x",), ((1,) * 40_000,), ("x" * 600_000,)):
        asked = [replace(request("a"), prompt=Prompt(parts=parts))]
        names.append(await pools.run(asked, lambda: threading.current_thread().name.split("_")[0]))
    many = [text_request(f"p{number}", "x" * 1000) for number in range(100)]
    names.append(await pools.run(many, lambda: threading.current_thread().name.split("_")[0]))
    assert names == ["tokenizer-0", "tokenizer-1", "tokenizer-2", "tokenizer-1"]
    pools.close()


async def test_an_adapter_that_does_not_fit_is_listed_with_its_reason_and_stops_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "adapter_config.json").write_text("{}")
    service = load_replica(config(DEMO), [read_adapter(folder, root=folder.parent)], replica_id="r1")
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
    settings["quantization_config"] = {"quant_method": "aqlm"}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelNotSupported, match="quant_method 'aqlm'"):
        load_replica(config(folder), replica_id="r1")
