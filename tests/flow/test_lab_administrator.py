"""What an administrator does in a notebook is done in the store, and what is told of ledger and adapters is a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from serve_app.core.ledger import Row
from serve_app.http.app import build_app
from serve_app.http.guard import Door
from serve_app.lab.administrator import Administrator
from serve_app.lab.client import Background, Client
from serve_app.lab.errors import ServiceError
from serve_app.router.publishing import Publishing
from serve_app.router.rollouts import Rollouts
from serve_app.router.router import Router
from tests.flow.house import House
from tests.flow.test_publishing import adapter_at

AT = 1.8e9


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.store.close()


@pytest.fixture
def administrator(house: House) -> Iterator[Administrator]:
    """In the loop in which the house is kept open."""
    background = Background()
    entered = house.kept_open()
    background.run(entered.__aenter__())
    made = Administrator("http://door", house.admin, http_client=asking(house), background=background)
    yield made
    background.run(entered.__aexit__(None, None, None))
    made.close()


def asking(house: House) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=house.app))


def test_a_team_is_added_with_what_is_said_of_it_and_its_key_opens_the_door(
    house: House, administrator: Administrator
) -> None:
    key = administrator.key_of("research", weight=3, models=["tiny"])
    assert administrator.teams().loc["research", ["weight", "models"]].to_list() == [3.0, ["tiny"]]
    own = Client("http://door", key, http_client=asking(house), background=administrator.background)
    assert list(own.models().index) == ["tiny"]
    with pytest.raises(ServiceError, match="admin"):
        Administrator("http://door", key, http_client=asking(house), background=administrator.background).teams()


def test_a_team_that_is_there_is_changed_and_keeps_its_keys(house: House, administrator: Administrator) -> None:
    first = administrator.key_of("research", weight=3, models=["tiny"])
    second = administrator.key_of("research", weight=1)
    assert administrator.teams().loc["research", ["weight", "models"]].to_list() == [1.0, ["tiny"]]
    for key in (first, second):
        assert len(Client("http://door", key, http_client=asking(house), background=administrator.background).models())


def test_a_removed_teams_key_is_good_for_nothing(house: House, administrator: Administrator) -> None:
    key = administrator.key_of("research")
    administrator.remove("research")
    assert "research" not in administrator.teams().index
    with pytest.raises(ServiceError) as refused:
        Client("http://door", key, http_client=asking(house), background=administrator.background).models()
    assert refused.value.status == 401


def test_what_the_service_refuses_is_told_in_its_words(administrator: Administrator) -> None:
    with pytest.raises(ServiceError) as refused:
        administrator.key_of("research", weight=-1)
    assert (refused.value.status, "weight" in str(refused.value)) == (400, True)


def test_the_ledger_is_a_table_by_what_was_asked_for(house: House, administrator: Administrator) -> None:
    rows = [
        Row(id=f"{tenant}/{number}", tenant=tenant, key_id="key", request_id="r", model="tiny", at=AT, cost=5 * 10**8)
        for tenant in ("acme", "beta")
        for number in range(2)
    ]
    house.admin_service.ledger.record(rows, (), AT)
    told = administrator.ledger("tenant,model")
    assert told.index.names == ["tenant", "model"]
    assert told.loc[("acme", "tiny"), ["requests", "cost"]].to_list() == [2, 1.0]
    assert list(administrator.ledger("tenant", tenant="beta").index) == ["beta"]
    assert len(administrator.ledger("tenant,model", since="2999-01-01")) == 0


@pytest.fixture
def publisher(house: House, administrator: Administrator, tmp_path: Path) -> Administrator:
    """The same service, whose adapters are below this folder."""
    publishing = Publishing(house.fleet, roots=[str(tmp_path)])
    door = Door(identify=lambda key: house.store.directory(b"p" * 32).identify(key, 1.0), administer=house.administer)
    house.app = build_app(
        Router(house.fleet, rollouts=Rollouts(publishing, house.fleet)), door=door, publishing=publishing
    )
    return Administrator("http://door", house.admin, http_client=asking(house), background=administrator.background)


def test_an_adapter_is_published_tried_taken_back_and_withdrawn(
    publisher: Administrator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter_at(tmp_path, "law")
    first = publisher.publish("tiny:law", Path("law"))
    assert publisher.adapters().loc["tiny:law", ["version", "replicas"]].to_list() == [first, 1]
    tried = publisher.publish("tiny:law", adapter_at(tmp_path, "law-2", b"v2"), canary="5%")
    row = publisher.adapters().loc["tiny:law"]
    assert row[["version", "canary.version", "canary.share"]].to_list() == [first, tried, 0.05]
    assert publisher.roll_back("tiny:law") == first
    with pytest.raises(ServiceError, match="lora_name"):
        publisher.publish("tiny:law", tmp_path / "law-2")
    assert publisher.publish("tiny:law", tmp_path / "law-2", in_place=True) == tried
    assert publisher.roll_back("tiny:law") == first
    publisher.withdraw("tiny:law")
    assert "tiny:law" not in publisher.adapters().index


def test_what_was_changed_is_a_table_of_events(administrator: Administrator) -> None:
    administrator.key_of("research")
    events = administrator.events()
    assert events["action"].to_list()[-2:] == ["add tenant", "create key"]
    assert len(administrator.events(after=int(events["id"].iloc[-1]))) == 0


def test_without_an_adapter_there_is_an_empty_table(
    administrator: Administrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Administrator, "_rows", lambda self, path: [])
    assert (len(administrator.adapters()), administrator.adapters().index.name) == (0, "id")


def test_what_changes_something_is_sent_once_whatever_fails() -> None:
    paths = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        paths.append(request.url.path)
        return httpx2.Response(503, json={"error": {"message": "changed, but not everywhere yet", "code": 503}})

    background = Background()
    made = Administrator(
        "http://door", "key", http_client=httpx2.AsyncClient(transport=httpx2.MockTransport(answer)),
        background=background,
    )  # fmt: skip
    with pytest.raises(ServiceError, match="not everywhere yet"):
        made.roll_back("demo:pirate")
    made.close()
    assert paths == ["/admin/adapters/rollback"]
