"""Two real engines behind one router: documents that are asked again are computed once."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from serve_app.core.names import ModelRef
from tests.flow.stack import ROUTER_ID, Stack, running_stack

NUM_DOCUMENTS, TIMES = 8, 10
WORDS = ["river", "stone", "harvest", "winter", "lantern", "bridge", "copper", "meadow", "sailor", "orchard"]


def document(number: int) -> str:
    random = Random(number)
    return " ".join(random.choices(WORDS, k=180))


async def cached_tokens(stack: Stack, *, at_once: int) -> tuple[int, int]:
    """Ask each document several times, so many requests at once; return its cached tokens and all prompt tokens."""
    asked = [f"{document(each)}\nquestion {time}" for each in range(NUM_DOCUMENTS) for time in range(TIMES)]
    Random(0).shuffle(asked)
    gate, used = asyncio.Semaphore(at_once), []

    async def ask(prompt: str) -> None:
        async with gate:
            used.append((await stack.complete(prompt=prompt, max_tokens=2))["usage"])

    await asyncio.gather(*map(ask, asked))
    await stack.settled()
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in used)
    return cached, sum(each["prompt_tokens"] for each in used)


@pytest.mark.slow
@pytest.mark.law("Placement")
async def test_two_replicas_find_nearly_as_much_as_one() -> None:
    found = []
    for num_replicas in (1, 2):
        async with running_stack(num_replicas=num_replicas) as stack:
            found.append(await cached_tokens(stack, at_once=8))
            loads = [service.card.load for service in stack.services]
            assert all(load.num_generated for load in loads)
    (alone, num_tokens), (together, _) = found
    assert alone > 0.6 * num_tokens
    assert together >= 0.9 * alone


@pytest.mark.slow
async def test_an_answer_follows_its_prefix_to_the_replica_that_has_it() -> None:
    async with running_stack(num_replicas=2) as stack:
        for number in range(4):
            first = await stack.complete(prompt=document(number), max_tokens=2)
            again = await stack.complete(prompt=f"{document(number)} and then", max_tokens=2)
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            tokens = again["usage"]["prompt_tokens"], again["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert tokens[1] > 0.8 * tokens[0]


async def test_a_card_tells_what_other_routers_sent_and_which_adapters_are_resident() -> None:
    async with running_stack(num_replicas=1) as stack:
        [service] = stack.services
        assert (await service.hello("router-1")).prefixes == ()
        body: dict[str, Any] = {"prompt": document(0), "max_tokens": 2}
        adapter = stack.fleet.cards["demo"].usable_adapters[0]
        await stack.complete(**body | {"model": f"demo:{adapter.name}"})
        card = await service.hello("router-1")
        assert len(card.prefixes) >= 3
        assert (await service.hello(ROUTER_ID)).prefixes == ()
        assert card.residency.versions == (adapter.version,)
        assert 0 < card.residency.load_s < 60
        assert card.residency.num_slots >= 1
        await stack.greet()
        found = stack.fleet.placement.warmth
        ref = ModelRef(base="demo", adapter=adapter.name, version=adapter.version)
        assert found.load_s("replica-0", [part.version for part in ref.parts]) == 0
        assert found.load_s("replica-0", ["unknown"]) == card.residency.load_s
