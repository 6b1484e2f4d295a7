"""A new router takes requests once it knows keys and models, and after a while in any case."""

from __future__ import annotations

import asyncio
from pathlib import Path

from serve_app.deployments.router import until_informed
from serve_app.router.fleet import Fleet
from serve_app.router.published_sources import FileSource, MemorySource
from serve_app.tenants.published import PublishedFile
from tests.fakes import FakeBackend, model_card, replica_card
from tests.router.test_discovery import TownCluster, discovery_of, seen


def unheard(folder: Path) -> FileSource:
    """Return a source that has told nothing yet."""
    return FileSource(PublishedFile(folder / "adapters.json"))


async def test_a_new_router_waits_for_keys_and_for_every_model_that_runs(tmp_path: Path) -> None:
    cluster, fleet, source = TownCluster(demo=seen(), loads=seen()), Fleet("router-0"), unheard(tmp_path)
    cluster.num_running = {"demo": 1}
    discovery, _ = discovery_of(cluster)
    waiting = asyncio.create_task(until_informed(source, discovery, fleet, within_s=3600.0))

    async def is_waiting() -> bool:
        done, _ = await asyncio.wait([waiting], timeout=0.12)  # more than one look
        return not done

    assert await is_waiting(), "nothing is known"
    await source.look()
    assert await is_waiting(), "the cluster has not told what runs"
    await discovery.look()
    assert await is_waiting(), "no replica was met of a model that runs"
    fleet.put(replica_card(model=model_card("demo")), FakeBackend())
    await waiting
    await fleet.close()


async def test_a_model_without_a_replica_is_not_waited_for() -> None:
    discovery, _ = discovery_of(TownCluster(loads=seen()))
    await discovery.look()
    await until_informed(MemorySource(), discovery, Fleet("router-0"), within_s=3600.0)


async def test_a_new_router_that_hears_nothing_takes_requests_all_the_same(tmp_path: Path) -> None:
    discovery, _ = discovery_of(TownCluster())
    await until_informed(unheard(tmp_path), discovery, Fleet("router-0"), within_s=0.0)
