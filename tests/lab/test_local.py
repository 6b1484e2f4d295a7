"""What a notebook starts is the cluster file's service with its changes; and whoever answers its key is asked first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli.screen import KEY_VARIABLES, URL_VARIABLE
from serve_app.deployments.arguments import ModelArgs, RouterArgs, RouterSettings
from serve_app.http.guard import Door
from serve_app.lab import local
from serve_app.tenants.opening import open_store
from tests.cli.served import serving
from tests.flow.house import PEPPER, House

FILE = Path(__file__).parents[2] / "cluster.yaml"
NOTHING: dict[str, Any] = {"args": {}, "model": {}, "router": {}, "settings": {}}


@pytest.fixture
def content() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return read


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """Answers at the address and to the key that the environment names, where a test sets them."""
    made = House(tmp_path)
    yield made
    made.store.close()


def door_of(house: House) -> Door:
    directory = house.store.directory(PEPPER.encode())
    return Door(identify=lambda key: directory.identify(key, time.time()), administer=house.administer)


def test_without_changes_the_cluster_file_is_served_as_it_is(content: dict[str, Any]) -> None:
    assert local.changed(content, **NOTHING) == content


def test_changes_go_where_they_belong_and_leave_the_rest(content: dict[str, Any]) -> None:
    before = yaml.safe_dump(content)
    made = local.changed(
        content,
        args={"adapters": "elsewhere"},
        model={"num_replicas": 1},
        router={"store": "sqlite:///kept.db"},
        settings={"auth": "keys", "prices": {"demo": {"completion": 1.5}}},
    )
    assert yaml.safe_dump(content) == before
    router, model = made["applications"]
    assert router["args"] == {"store": "sqlite:///kept.db"}
    assert router["deployments"][0]["num_replicas"] == 1
    user_config = router["deployments"][0]["user_config"]
    assert user_config == content["applications"][0]["deployments"][0]["user_config"] | {
        "auth": "keys",
        "prices": {"demo": {"completion": 1.5}},
    }
    assert model["args"]["path"] == "builtin:demo"
    assert model["deployments"][0]["num_replicas"] == 1
    RouterArgs.model_validate(router["args"])
    assert RouterSettings.model_validate(user_config).asks_for_keys(has_accounts=True)
    assert ModelArgs.model_validate(model["args"]).adapters == "elsewhere"


def test_only_an_administrators_key_makes_a_service_ones_own(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    acme = house.key("acme")["authorization"].removeprefix("Bearer ")
    with serving(door_of(house)) as served:
        assert local.is_administered_by(house.admin, served.url)
        assert not local.is_administered_by(acme, served.url)
        monkeypatch.setenv(URL_VARIABLE, f"{served.url}/")
        monkeypatch.setenv(KEY_VARIABLES[0], house.admin)
        found = local.find_or_start_with_keys(settings={"prices": {}})
    assert found == local.Local(url=served.url, key=house.admin)
    assert not local.is_administered_by(house.admin, served.url)  # nobody answers there any more


def test_a_key_of_a_new_store_is_an_administrators(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by the command line, as a person would; the store is what the service opens then."""
    monkeypatch.setenv("PYTHONPATH", str(FILE.parent))
    store = {"store": f"sqlite:///{tmp_path / 'kept.db'}", "pepper": str(tmp_path / "pepper")}
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(local.changed(content, **{**NOTHING, "router": store})), encoding="utf-8")
    key = local.administrators_key(file, tmp_path)
    opened, pepper = open_store(store["store"], pepper_file=Path(store["pepper"]), environment=None)
    identity = opened.directory(pepper).identify(key, time.time())
    assert "admin" in identity.scopes
    opened.close()
