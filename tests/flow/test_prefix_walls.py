"""Which cached prefixes a tenant finds, counted in a real engine: all of its own, none of another's."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from benchmarks.bench_prefix_timing import BLOCK, prompt_of
from serve_app.core.tenants import Identity, Tenant
from serve_app.http.guard import Door
from tests.engine.harness import core_of
from tests.flow.stack import Stack, running_stack

pytestmark = pytest.mark.slow

PROMPTS = [prompt_of(random.Random(number), num_words=60 + 20 * number) for number in range(6)]
GROUPS = {"ours": "lab", "theirs": "lab"}


def as_named(key: str | None) -> Identity:
    """Every name is a tenant of that name."""
    return Identity(tenant=Tenant(name=key or "", cache_group=GROUPS.get(key or "")), key_id="key")


@pytest.fixture
async def walled() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1, door=Door(identify=as_named), threads=1) as stack:
        yield stack


@pytest.fixture
async def unwalled() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1, threads=1) as stack:
        yield stack


async def hits(stack: Stack, tenant: str | None) -> list[tuple[int, int]]:
    """Cached and all tokens of each prompt, as the answers tell."""
    found = []
    for prompt in PROMPTS:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        usage = (await stack.post(body, key=tenant)).json()["usage"]
        found.append((usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]))
    return found


@pytest.mark.law("Caches are apart")
async def test_a_tenant_finds_all_of_its_own_prefixes_and_none_of_anothers(walled: Stack, unwalled: Stack) -> None:
    """Seven services shared caches between customers, who told each other's prompts by time (arXiv 2502.07776)."""
    before, again = await hits(unwalled, None), await hits(unwalled, None)
    assert [cached for cached, _ in before] == [0] * len(PROMPTS)
    assert all(cached >= total - BLOCK for cached, total in again), "without tenants everything is found"
    for number, tenant in enumerate(("acme", "beta", "gamma")):
        assert [cached for cached, _ in await hits(walled, tenant)] == [0] * len(PROMPTS), tenant
        assert core_of(walled.services[0]).load.num_prefix_hit_tokens == sum(cached for cached, _ in again) * number
        assert await hits(walled, tenant) == again


async def test_tenants_of_a_group_find_each_others(walled: Stack) -> None:
    await hits(walled, "ours")
    assert all(cached for cached, _ in await hits(walled, "theirs"))
    assert not any(cached for cached, _ in await hits(walled, "lab")), "a tenant of the name of a group is none of it"
