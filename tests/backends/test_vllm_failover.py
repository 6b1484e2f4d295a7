"""Where vLLM computes, a stream whose replicas die at several of its tokens has those of the undisturbed one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from serve_app.core.cards import ReplicaCard
from serve_app.replica.service import ModelService
from tests.flow.stack import Stack, running_stack
from tests.flow.test_failover import KINDS, PROMPT, Fate, differs, joined, told

pytestmark = pytest.mark.asyncio(loop_scope="module")

OF_ROUTERS = {"attach", "submit", "abort", "pause", "resume"}


class Guise:
    """One replica as if it were several: each has the router's streams under another name.

    Two engines of vLLM in one process disturb each other, so that a test has one.
    """

    def __init__(self, service: ModelService, number: int) -> None:
        self._service, self._number = service, number

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._service, name)
        return (lambda router, *rest: found(f"{router}/{self._number}", *rest)) if name in OF_ROUTERS else found

    async def hello(self, router_id: str, *heard: Any) -> ReplicaCard:
        card = await self._service.hello(f"{router_id}/{self._number}", *heard)
        return replace(card, replica_id=f"{card.replica_id}/{self._number}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    """Three replicas, as the router sees it."""
    async with running_stack(num_replicas=1, engine="vllm", max_adapters=2, vllm={"enforce_eager": True}) as made:
        guises: list[Any] = [Guise(made.services[0], number) for number in range(3)]
        made.fleet.remove((await made.services[0].hello("nobody")).replica_id)
        yield replace(made, services=guises)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"states"}))
async def test_a_stream_that_is_cut_is_the_undisturbed_one(stack: Stack, kind: str) -> None:
    path, members = KINDS[kind]
    body = {"max_tokens": 12, "stream_options": {"include_usage": True}, **members}
    if "chat" not in path:
        body.setdefault("prompt", PROMPT)
    expected, num_died = joined(await told(stack, path, body, Fate())), 0
    for life in (1, 2, 5):
        fate = Fate(life=life, num_left=2)
        difference = differs(joined(await told(stack, path, body, fate)), expected)
        assert not difference, f"replicas died behind {life} frames: {difference}"
        num_died += fate.num_died
    assert num_died >= 5
    await stack.settled()
