"""Discovery against a cluster made of dictionaries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from serve_app.core.backend import NOTHING, Backend
from serve_app.core.cards import NO_SCALES, ModelCard, ReplicaCard, Scale
from serve_app.core.delta import Frame
from serve_app.core.errors import ReplicaLost
from serve_app.core.ledger import News
from serve_app.core.request import GenerationRequest
from serve_app.router.discovery import Deployed, Discovery, Sighting
from tests.fakes import model_card, settle


def card(replica_id: str, model: str = "demo") -> ReplicaCard:
    return ReplicaCard(replica_id=replica_id, model=model_card(model))


class Way:
    """A backend that only greets, as long as its replica lives."""

    def __init__(self, cluster: TownCluster, application: str, replica_id: str) -> None:
        self._cluster, self._application, self._replica_id = cluster, application, replica_id

    async def hello(self, router_id: str, heard: Mapping[str, int] = NOTHING) -> ReplicaCard:
        self._cluster.hellos.append(self._replica_id)
        if self._replica_id not in self._cluster.alive:
            raise ReplicaLost("gone")
        last = News(until=heard.get(self._replica_id, 0) + 1)
        return replace(card(self._replica_id, self._application), news=last)

    async def attach(self, router_id: str) -> AsyncGenerator[Frame, None]:
        raise AssertionError("discovery does not attach")
        yield

    async def submit(self, router_id: str, requests: Sequence[GenerationRequest]) -> bool:
        raise AssertionError("discovery does not submit")

    async def abort(self, router_id: str, request_ids: Sequence[str]) -> None:
        raise AssertionError("discovery does not abort")


class TownCluster:
    """Applications by name with what each answers to a greeting; `alive` can be reached by a call of their own."""

    def __init__(self, **applications: Sighting | Exception) -> None:
        self.answers = dict(applications)
        self.coming = dict.fromkeys(applications, True)
        self.failed: set[str] = set()
        self.scales: dict[str, Scale] = {}
        self.num_running: dict[str, int] = {}
        self.alive: set[str] = set()
        self.hellos: list[str] = []
        self.is_deleted = False

    async def applications(self) -> Mapping[str, Deployed]:
        return {
            name: Deployed(
                model=name,
                is_coming=self.coming[name],
                has_failed=name in self.failed,
                scale=self.scales.get(name),
                num_running=self.num_running.get(name, 0),
            )
            for name in self.answers
        }

    async def greet(self, application: str, router_id: str, heard: Mapping[str, int]) -> Sighting:
        answer = self.answers[application]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def backend(self, application: str, replica_id: str) -> Backend:
        return Way(self, application, replica_id)


class Table:
    """A fleet, and what publishes to it, that only remembers."""

    def __init__(self) -> None:
        self.fleet = self
        self.backends: dict[str, Backend] = {}
        self.expected: set[str] = set()
        self.failed: set[str] = set()
        self.scales: dict[str, Scale] = {}
        self.heard: list[tuple[str, int]] = []
        self.asleep: set[str] = set()
        self.done: set[str] = set()

    def put(self, card: ReplicaCard, backend: Backend) -> None:
        self.backends[card.replica_id] = backend
        self.hear(card)

    def hear(self, card: ReplicaCard) -> None:
        self.heard.append((card.replica_id, card.news.until))

    def remove(self, replica_id: str) -> None:
        del self.backends[replica_id]

    def rest(self, model: str, card: ModelCard | None) -> None:
        self.asleep = self.asleep - {model} if card is None else self.asleep | {card.name}

    def is_done_with(self, replica_id: str) -> bool:
        return replica_id in self.done

    def expect(
        self, models: Iterable[str], failed: Iterable[str] = (), scales: Mapping[str, Scale] = NO_SCALES
    ) -> None:
        self.expected, self.failed, self.scales = set(models), set(failed), dict(scales)


def seen(*replica_ids: str, is_complete: bool = True) -> Sighting:
    return Sighting(cards=tuple(map(card, replica_ids)), is_complete=is_complete)


def discovery_of(cluster: TownCluster) -> tuple[Discovery, Table]:
    table = Table()
    return Discovery(cluster, table, "router-1"), table


async def test_replicas_that_answer_are_in_the_fleet_and_those_gone_are_not() -> None:
    cluster = TownCluster(demo=seen("a", "b"))
    discovery, table = discovery_of(cluster)
    await discovery.look()
    assert set(table.backends) == {"a", "b"}
    cluster.answers["demo"] = seen("b", "c")
    await discovery.look()
    assert set(table.backends) == {"b", "c"}


async def test_a_replica_keeps_its_backend_from_one_look_to_the_next() -> None:
    discovery, table = discovery_of(TownCluster(demo=seen("a")))
    await discovery.look()
    before = table.backends["a"]
    await discovery.look()
    assert table.backends["a"] is before


async def test_an_application_without_replicas_is_expected_and_one_that_failed_is_told_as_failed() -> None:
    cluster = TownCluster(slow=seen(), broken=seen())
    cluster.coming["broken"] = False
    cluster.failed = {"broken"}
    discovery, table = discovery_of(cluster)
    await discovery.look()
    assert (table.expected, table.failed) == ({"slow"}, {"broken"})


async def test_the_fleet_is_told_how_many_replicas_are_wanted_as_soon_as_that_is_known() -> None:
    cluster = TownCluster(demo=seen("a"), new=seen())
    cluster.scales = {"demo": Scale(wanted=3, starting=2, draining=0)}
    discovery, table = discovery_of(cluster)
    await discovery.look()
    assert table.scales == cluster.scales
    cluster.scales = {}
    await discovery.look()
    assert table.scales == {}


async def test_one_application_that_fails_does_not_disturb_another() -> None:
    cluster = TownCluster(broken=RuntimeError("no answer"), demo=seen("a"))
    discovery, table = discovery_of(cluster)
    await discovery.look()
    assert set(table.backends) == {"a"}


async def test_a_replica_that_a_broken_greeting_left_out_stays_if_it_can_be_reached() -> None:
    cluster = TownCluster(demo=seen("a", "b"))
    discovery, table = discovery_of(cluster)
    await discovery.look()
    cluster.alive = {"a"}
    cluster.answers["demo"] = TimeoutError()
    await discovery.look()
    assert set(table.backends) == {"a"}


async def test_a_replica_that_left_is_greeted_until_it_cannot_be_reached() -> None:
    cluster = TownCluster(demo=seen("a"))
    discovery, table = discovery_of(cluster)
    await discovery.look()
    cluster.alive = {"a"}
    cluster.answers["demo"] = seen()
    await discovery.look()
    assert not table.backends
    await discovery.look()
    await discovery.look()
    assert cluster.hellos == ["a", "a"], "a replica that drains needs its lease renewed"
    cluster.alive = set()
    await discovery.look()
    await discovery.look()
    assert cluster.hellos == ["a", "a", "a"]
    assert table.heard == [("a", 0), ("a", 1), ("a", 2)], "what it spent to the end, each time from the last"


async def test_the_replicas_of_a_deleted_application_leave_the_fleet() -> None:
    cluster = TownCluster(demo=seen("a"), other=seen("o"))
    discovery, table = discovery_of(cluster)
    await discovery.look()
    del cluster.answers["demo"]
    await discovery.look()
    assert set(table.backends) == {"o"}


@pytest.mark.parametrize("is_silent", [True, False])
async def test_what_was_known_stays_and_is_greeted_where_the_cluster_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """A controller that is gone ends no lease of a router."""
    cluster, is_back = TownCluster(demo=seen("a")), asyncio.Event()
    discovery, table = discovery_of(cluster)
    await discovery.look()
    applications, num_asked = cluster.applications, 0

    async def unreachable() -> Mapping[str, Deployed]:
        nonlocal num_asked
        num_asked += 1
        if not is_silent:
            raise ConnectionError
        await is_back.wait()
        return await applications()

    monkeypatch.setattr("serve_app.router.discovery.ANSWER_S", 0.01)
    monkeypatch.setattr(cluster, "applications", unreachable)
    for replica_ids in (("a",), ("a", "b")):
        cluster.answers["demo"] = seen(*replica_ids)
        await discovery.look()
        assert set(table.backends) == set(replica_ids)
    assert num_asked == (1 if is_silent else 2), "a question that hangs is asked once"
    cluster.answers["other"], cluster.coming["other"] = seen("o"), True
    monkeypatch.setattr(cluster, "applications", applications)
    is_back.set()
    await discovery.look()
    assert set(table.backends) == {"a", "b", "o"}


async def test_which_models_run_is_known_once_the_cluster_has_told_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreachable() -> Mapping[str, Deployed]:
        raise ConnectionError

    cluster = TownCluster(demo=seen("a"), loads=seen())
    cluster.num_running = {"demo": 2}
    discovery, _ = discovery_of(cluster)
    with monkeypatch.context() as patched:
        patched.setattr(cluster, "applications", unreachable)
        await discovery.look()
    assert discovery.running is None
    await discovery.look()
    assert discovery.running == {"demo"}


async def test_the_router_hears_of_its_own_end() -> None:
    cluster = TownCluster()
    ends: list[str] = []
    discovery = Discovery(cluster, Table(), "router-0", on_deleted=lambda: ends.append("told"))
    await discovery.look()
    assert ends == []
    cluster.is_deleted = True
    await discovery.look()
    assert ends == ["told"]


async def test_a_model_that_was_scaled_to_zero_is_asleep_until_a_replica_answers() -> None:
    cluster = TownCluster(demo=seen("a"))
    discovery, table = discovery_of(cluster)
    await discovery.look()
    assert table.asleep == set()
    cluster.answers["demo"] = Sighting(cards=(), is_complete=True, asleep=model_card("demo"))
    await discovery.look()
    assert (table.asleep, table.backends) == ({"demo"}, {})
    cluster.answers["demo"] = seen("b")
    await discovery.look()
    assert (table.asleep, set(table.backends)) == (set(), {"b"})


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_sleeping_models_idle_replica_is_called_no_more_and_a_busy_one_keeps_its_lease(is_done: bool) -> None:
    cluster = TownCluster(demo=seen("a"))
    cluster.alive = {"a"}
    discovery, table = discovery_of(cluster)
    await discovery.look()
    table.done = {"a"} if is_done else set()
    cluster.answers["demo"] = Sighting(cards=(), is_complete=True, asleep=model_card("demo"))
    await discovery.look()
    await discovery.look()
    assert cluster.hellos == ([] if is_done else ["a"])


async def test_however_often_it_is_hurried_there_is_time_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.router.discovery.LEAST_PERIOD_S", 3600.0)
    cluster = TownCluster(demo=seen("a"))
    discovery, table = discovery_of(cluster)
    running = asyncio.create_task(discovery.run())
    await settle()
    assert "a" in table.backends
    cluster.answers["demo"] = seen("a", "b")
    for _ in range(100):
        discovery.hurry()
        await settle(1)
    assert "b" not in table.backends
    running.cancel()


async def test_it_looks_at_once_when_it_is_hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.router.discovery.PERIOD_S", 3600.0)
    cluster = TownCluster(demo=seen("a"))
    discovery, table = discovery_of(cluster)
    running = asyncio.create_task(discovery.run())
    try:
        async with asyncio.timeout(60):
            while "a" not in table.backends:  # noqa: ASYNC110
                await asyncio.sleep(0)
            cluster.answers["demo"] = seen("a", "b")
            discovery.hurry()
            while "b" not in table.backends:  # noqa: ASYNC110
                await asyncio.sleep(0)
    finally:
        running.cancel()
