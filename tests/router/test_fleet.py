"""The table of replicas says what can be asked for, and who can answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import permutations

import pytest

from serve_app.catalog.files import CatalogError
from serve_app.core.cards import AdapterCard, Scale
from serve_app.core.errors import AdapterNotFound, ModelLoading, ModelNotFound
from serve_app.core.names import ModelRef
from serve_app.core.prefixes import prefixes_of
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest
from serve_app.router.fleet import LOADING_RETRY_S, Fleet
from serve_app.router.router import Router
from serve_app.router.run import Run
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card
from tests.parsing import parse_completion


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet("router-0")
    yield fleet
    await fleet.close()


def put(fleet: Fleet, replica_id: str, *, model: str = "tiny", version: str | None = None) -> FakeBackend:
    adapters = () if version is None else (adapter_card("sql", version),)
    card = replica_card(replica_id, model_card(model, *adapters))
    backend = FakeBackend(card)
    fleet.put(card, backend)
    return backend


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_model_is_resolved_once_a_replica_of_it_is_there(fleet):
    with pytest.raises(ModelNotFound):
        fleet.resolve("tiny")
    put(fleet, "r0")
    assert fleet.resolve("tiny") == ModelRef(base="tiny")


async def test_a_model_that_is_deployed_but_not_ready_is_loading(fleet):
    put(fleet, "r0", version="v1")
    fleet.expect(["tiny", "big"])
    for name in ("big", "big:sql"):
        with pytest.raises(ModelLoading) as caught:
            fleet.resolve(name)
        assert (caught.value.status, caught.value.retry_after_s) == (503, LOADING_RETRY_S)
    with pytest.raises(ModelNotFound):
        fleet.resolve("bigger")
    with pytest.raises(AdapterNotFound):
        fleet.resolve("tiny:nobody")


async def test_the_target_of_an_alias_may_be_loading(fleet):
    fleet.rename({"fast": "big:sql", "faster": "fast"})
    fleet.expect(["big"])
    for alias in ("fast", "faster"):
        with pytest.raises(ModelLoading):
            fleet.resolve(alias)


async def test_a_served_name_wins_over_an_alias_and_the_other_aliases_stay(fleet):
    fleet.rename({"tiny": "big", "small": "tiny"})
    put(fleet, "r0")
    assert fleet.resolve("tiny") == ModelRef(base="tiny")
    assert fleet.resolve("small") == ModelRef(base="tiny")


async def test_aliases_in_a_circle_are_refused_and_the_old_ones_stay(fleet):
    put(fleet, "r0")
    fleet.rename({"small": "tiny"})
    with pytest.raises(CatalogError):
        fleet.rename({"a": "b", "b": "a"})
    assert fleet.resolve("small") == ModelRef(base="tiny")


async def test_the_fleet_is_ready_when_every_known_model_has_a_replica(fleet):
    assert not fleet.is_ready
    fleet.expect(["tiny", "big"])
    put(fleet, "r0")
    assert (fleet.is_ready, fleet.loading) == (False, ["big"])
    put(fleet, "r1", model="big")
    assert (fleet.is_ready, fleet.loading) == (True, [])


async def test_every_replica_is_known_where_what_does_not_run_has_failed_or_sleeps(fleet: Fleet) -> None:
    """Else a stream that is nowhere would be looked for as long as that is so."""
    scale = Scale(wanted=1, starting=0, draining=0)
    fleet.expect(["tiny"], ["broken"], {"tiny": scale, "broken": scale})
    assert not fleet.is_known
    put(fleet, "r0")
    assert fleet.is_known
    fleet.remove("r0")
    assert not fleet.is_known
    fleet.expect(["tiny"], scales={"tiny": replace(scale, wanted=0)})
    fleet.rest("tiny", model_card("tiny"))
    assert fleet.is_known


async def test_a_model_whose_last_replica_was_lost_is_loading_until_it_is_back(fleet):
    backend = put(fleet, "r0")
    await settle()
    backend.die()
    await settle()
    assert not fleet.is_ready
    with pytest.raises(ModelLoading):
        fleet.resolve("tiny")
    put(fleet, "r0")
    assert fleet.resolve("tiny") == ModelRef(base="tiny")
    assert fleet.is_ready


@pytest.mark.parametrize("is_running", [True, False], ids=["a request runs", "idle"])
async def test_a_replica_that_ended_the_stream_of_a_silent_router_is_there_at_once(fleet, is_running):
    backend = put(fleet, "r0")
    backend.is_stepped = True
    await settle()
    run = Router(fleet).open(parse_completion(b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'))
    reading = asyncio.create_task(whole(run)) if is_running else None
    await settle()
    backend.end_stream("router-0")  # its lease has expired while the router stood still
    await settle()
    reading = reading or asyncio.create_task(whole(run))
    await settle()
    assert fleet.is_ready
    backend.step()
    assert await asyncio.wait_for(reading, 60) == " p0s0w0"
    assert len(backend.aborted) == is_running, "what it may have computed for nobody"


async def test_a_replica_that_ends_every_stream_is_left_until_it_is_seen_again(fleet):
    backend = put(fleet, "r0")
    for _ in range(2):
        await settle()
        backend.end_stream("router-0")
    await settle()
    assert not fleet.is_ready
    fleet.put(backend.card, backend)
    assert fleet.is_ready


async def whole(run: Run) -> str:
    async with run:
        return "".join([event.delta.text async for event in run])


async def test_a_removed_replica_gets_no_requests(fleet):
    put(fleet, "r0")
    put(fleet, "r1")
    fleet.remove("r0")
    assert [link.replica_id for link in fleet.links_for(ModelRef(base="tiny"))] == ["r1"]
    fleet.remove("r1")
    with pytest.raises(ModelNotFound):
        fleet.resolve("tiny")


async def test_seeing_a_replica_again_keeps_its_stream_and_refreshes_its_card(fleet):
    backend = put(fleet, "r0")
    await settle()
    fleet.put(replica_card("r0", model_card("tiny", adapter_card("sql", "v2"))), backend)
    await settle()
    assert backend.num_attached == 1
    assert fleet.resolve("tiny:sql").version == "v2"


async def test_a_removed_replica_that_is_seen_again_keeps_its_stream_while_it_has_work(fleet):
    backend = put(fleet, "r0")
    backend.is_stepped = True
    (link,) = fleet.links_for(ModelRef(base="tiny"))
    request = GenerationRequest(request_id="a", model=ModelRef(base="tiny"), prompt=Prompt(parts=("Hello",)), n=1)
    await link.submit([request], lambda _: None)
    fleet.remove("r0")
    assert fleet.put(backend.card, backend) is link
    assert link.is_open


async def test_a_removed_idle_replica_that_is_seen_again_gets_a_new_stream(fleet):
    backend = put(fleet, "r0")
    await settle()
    fleet.remove("r0")
    link = fleet.put(backend.card, backend)
    await settle()
    assert backend.num_attached == 1
    assert fleet.links_for(ModelRef(base="tiny")) == [link]


def at(version: str, *, created: int = 0, reason: str | None = None) -> AdapterCard:
    return replace(adapter_card("sql", version, reason=reason), created=created)


@pytest.mark.parametrize(
    ("cards", "meant"),
    [
        ((None, at("v1")), "v1"),
        ((at("v1"), None, None), "v1"),
        ((at("v1"), at("v2"), at("v1")), "v1"),
        ((at("v1", created=1), at("v2", created=2)), "v2"),
        ((at("v2", created=1), at("v1", created=2)), "v1"),
        ((at("v1"), at("v2")), "v2"),
        ((at("v2", reason="torn"), at("v2", reason="torn"), at("v1")), "v1"),
    ],
    ids=["one has it", "one of three has it", "most", "newest", "newest by another name", "a tie", "usable"],
)
async def test_an_adapter_is_what_open_replicas_have_together_in_any_order(
    cards: tuple[AdapterCard | None, ...], meant: str
) -> None:
    having = {f"r{i}" for i, each in enumerate(cards) if each is not None and each.is_usable and each.version == meant}
    for order in permutations(enumerate(cards)):
        fleet = Fleet("router-0")
        for number, each in order:
            card = replica_card(f"r{number}", model_card("tiny", *(() if each is None else (each,))))
            fleet.put(card, FakeBackend(card))
        ref = fleet.resolve("tiny:sql")
        assert ref.version == meant
        assert {link.replica_id for link in fleet.links_for(ref)} == having
        assert len(fleet.links_for(ModelRef(base="tiny"))) == len(cards)
        assert [entry.id for entry in Router(fleet).models()] == ["tiny", "tiny:sql"]
        await fleet.close()


async def test_an_adapter_that_its_last_replica_lost_is_not_there_and_others_stay(fleet):
    backend = put(fleet, "r0", version="v1")
    put(fleet, "r1")
    fleet.put(replica_card("r0", model_card("tiny", adapter_card("poet"))), backend)
    assert fleet.resolve("tiny:poet").version == "v1"
    with pytest.raises(AdapterNotFound):
        fleet.resolve("tiny:sql")


async def test_a_mix_whose_parts_no_replica_has_together_is_told_so(fleet):
    for replica_id, name in (("r0", "sql"), ("r1", "poet")):
        card = replica_card(replica_id, model_card("tiny", adapter_card(name)))
        fleet.put(card, FakeBackend(card))
    with pytest.raises(ModelLoading, match="all adapters of"):
        fleet.links_for(fleet.resolve("tiny:poet*0.5+sql*0.5"))


async def test_default_is_the_only_model_there_is(fleet: Fleet) -> None:
    put(fleet, "r0")
    assert fleet.resolve("default") == ModelRef(base="tiny")
    put(fleet, "r1", model="other")
    with pytest.raises(ModelNotFound):
        fleet.resolve("default")


async def place(fleet: Fleet, text: str) -> str:
    """Have a prompt completed, and return the replica that it was given to."""
    body = json.dumps({"model": "tiny", "prompt": text, "max_tokens": 2})
    async with Router(fleet).open(parse_completion(body.encode())) as run:
        async for _ in run:
            pass
        [(_, _, [replica_id])] = run.stats.parts
    return replica_id


@pytest.mark.law("Placement")
@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_prompt_returns_to_its_replica_until_that_is_gone(fleet: Fleet, is_lost: bool) -> None:
    backends = {each: put(fleet, each) for each in ("r0", "r1", "r2")}
    texts = [f"{number} " * 400 for number in range(9)]
    first = [await place(fleet, text) for text in texts]
    assert [await place(fleet, f"{text} more") for text in texts] == first
    assert len(set(first)) > 1
    gone = first[0]
    if is_lost:
        backends[gone].die()
        await settle()
    fleet.remove(gone)
    again = [await place(fleet, text) for text in texts]
    assert gone not in again
    assert all(new == old for new, old in zip(again, first, strict=True) if old != gone)
    put(fleet, gone)  # it begins with an empty cache
    assert [await place(fleet, text) for text in texts] == again


async def test_what_other_routers_sent_is_heard_with_the_card(fleet: Fleet) -> None:
    backends = [put(fleet, each) for each in ("r0", "r1", "r2")]
    texts = [f"{number} " * 400 for number in range(6)]
    for number, text in enumerate(texts):  # whichever replica this router would take, another one has it
        request = GenerationRequest(request_id="r", model=ModelRef(base="tiny"), prompt=Prompt(parts=(text,)))
        card = replace(backends[number % 3].card, prefixes=prefixes_of(request).names)
        fleet.put(card, backends[number % 3])
    assert [await place(fleet, text) for text in texts] == ["r0", "r1", "r2"] * 2
