"""What administrators ask for, by name, and what is written down of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import SQLAlchemyError

from serve_app.api.paths import OF_ADAPTERS, SERVICES
from serve_app.core.errors import Unauthenticated
from serve_app.core.tenants import Scope
from serve_app.tenants.admin_service import DEFAULT_OVERLAP_S, AdminService
from serve_app.tenants.errors import NotThere, TenancyError
from serve_app.tenants.opening import open_store
from serve_app.tenants.store import Author, TenantStore

PEPPER = "p" * 32
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TenantStore]:
    made, _ = open_store(f"sqlite:///{tmp_path / 'kept.db'}", pepper_file=tmp_path / "none", environment=PEPPER)
    yield made
    made.close()


@pytest.fixture
def ask(store: TenantStore) -> Ask:
    admin_service = AdminService(store, PEPPER.encode())

    def asked(service: str, at: float = 0.0, **arguments: object) -> dict[str, Any]:
        return admin_service.answer(service, arguments, Author(name="key-boss", at=at))

    return asked


def test_every_service_that_http_names_is_one(ask: Ask) -> None:
    of_the_folder = {"add_file", "read_file"}  # routers do these, beside `BatchStore.add_file`
    for service in {each.name for (path, _), each in SERVICES.items() if path not in OF_ADAPTERS} - of_the_folder:
        try:
            ask(service, name="nobody", id="nobody", tenant="nobody")
        except TenancyError:
            continue  # it is there


def test_a_tenant_is_added_changed_shown_and_removed(ask: Ask) -> None:
    assert ask("add_tenant", name="acme", max_n=2)["max_n"] == 2
    assert ask("set_tenant", name="acme", limits={"max_in_flight": 4})["limits"]["max_in_flight"] == 4
    assert ask("show_tenant", name="acme")["max_n"] == 2
    assert [each["name"] for each in ask("list_tenants")["data"]] == ["acme"]
    assert ask("remove_tenant", name="acme") == {"removed": "acme"}
    for service in ("show_tenant", "set_tenant", "remove_tenant"):
        with pytest.raises(NotThere):
            ask(service, name="acme")


def test_the_tenant_of_the_administrators_stays(ask: Ask) -> None:
    made = ask("create_admin_key")
    with pytest.raises(TenancyError, match="'administrators' stays"):
        ask("remove_tenant", name="administrators")
    ask("apply_tenants", tenants=[])
    assert [each["id"] for each in ask("list_keys")["data"]] == [made["id"]]


def test_a_key_is_shown_when_it_is_made_and_never_again(ask: Ask, store: TenantStore) -> None:
    ask("add_tenant", name="acme")
    made = ask("create_key", tenant="acme", lifetime_s=60)
    rotated = ask("rotate_key", id=made["id"], at=10.0, overlap_s=5)
    listed = json.dumps([ask("list_keys", at=20.0), ask("list_events")])
    for secret in (made["key"], rotated["key"]):
        assert secret[3:] not in listed
    assert store.directory(PEPPER.encode()).identify(rotated["key"], 20.0).tenant.name == "acme"
    assert [(each["id"], each["is_valid"]) for each in ask("list_keys", at=20.0)["data"]] == [
        (made["id"], False),
        (rotated["id"], True),
    ]
    assert "digest" not in listed


def test_a_rotated_key_overlaps_for_a_day_where_nothing_is_said(ask: Ask, store: TenantStore) -> None:
    ask("add_tenant", name="acme")
    made = ask("create_key", tenant="acme")
    ask("rotate_key", id=made["id"])
    directory = store.directory(PEPPER.encode())
    directory.identify(made["key"], DEFAULT_OVERLAP_S - 1)
    with pytest.raises(Unauthenticated):
        directory.identify(made["key"], DEFAULT_OVERLAP_S)


def test_the_first_key_of_an_administrator_needs_no_tenant_and_completes_nothing(ask: Ask, store: TenantStore) -> None:
    for _ in range(2):
        made = ask("create_admin_key")
        identity = store.directory(PEPPER.encode()).identify(made["key"], 1.0)
        assert identity.scopes == {Scope.ADMIN, Scope.METRICS}
        assert not identity.tenant.rights.touch("demo")


@pytest.mark.parametrize(
    "arguments",
    [
        {"tenant": "acme", "scopes": []},
        {"tenant": "acme", "scopes": ["root"]},
        {"tenant": "acme", "scopes": [[]]},
        {"tenant": "acme", "scopes": "infer"},
        {"tenant": "acme", "lifetime_s": 0},
        {"tenant": "acme", "lifetime_s": "long"},
        {"tenant": "acme", "life": 5},
        {"tenant": 5},
        {"tenant": "nobody"},
        {},
    ],
)
def test_what_is_no_key_is_refused(ask: Ask, arguments: dict[str, object]) -> None:
    ask("add_tenant", name="acme")
    with pytest.raises(TenancyError):
        ask("create_key", **arguments)
    assert ask("list_keys")["data"] == []


def test_every_change_leaves_an_event_and_what_is_refused_none(ask: Ask) -> None:
    ask("add_tenant", name="acme", at=1.0)
    made = ask("create_key", tenant="acme", at=2.0)
    ask("revoke_key", id=made["id"], at=3.0)
    ask("set_tenant", name="acme", weight=2, at=4.0)
    ask("remove_tenant", name="acme", at=5.0)
    with pytest.raises(TenancyError):
        ask("remove_tenant", name="acme", at=6.0)
    events = ask("list_events")["data"]
    assert [(each["at"], each["action"]) for each in events] == [
        (1.0, "add tenant"),
        (2.0, "create key"),
        (3.0, "end key"),
        (4.0, "set tenant"),
        (5.0, "remove tenant"),
    ]
    assert {each["actor"] for each in events} == {"key-boss"}
    assert [each["at"] for each in ask("list_events", after=events[2]["id"])["data"]] == [4.0, 5.0]


def test_events_say_whether_there_are_more(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.tenants.admin_service.MOST_EVENTS", 2)
    for name in "abc":
        ask("add_tenant", name=name)
    first = ask("list_events")
    assert ([each["subject"] for each in first["data"]], first["has_more"]) == (["a", "b"], True)
    rest = ask("list_events", after=first["data"][-1]["id"])
    assert ([each["subject"] for each in rest["data"]], rest["has_more"]) == (["c"], False)


@pytest.mark.parametrize("statement", ["DELETE FROM events", "UPDATE events SET actor = 'nobody'"])
def test_the_database_itself_lets_no_event_be_changed(ask: Ask, store: TenantStore, statement: str) -> None:
    ask("add_tenant", name="acme")
    with store.engine.begin() as connection, pytest.raises(SQLAlchemyError, match="only added"):
        connection.exec_driver_sql(statement)


def test_a_file_of_tenants_is_applied_and_a_dry_run_changes_nothing(ask: Ask) -> None:
    ask("add_tenant", name="old")
    ask("add_tenant", name="same", weight=2)
    ask("add_tenant", name="other", weight=2)
    ask("create_admin_key")
    wanted = [{"name": "same", "weight": 2}, {"name": "other", "weight": 3}, {"name": "new"}]
    before = ask("list_tenants")
    told = ask("apply_tenants", tenants=wanted, dry_run=True)
    assert [each["name"] for each in told["added"]] == ["new"]
    assert (told["changed"], told["removed"]) == ({"other": {"weight": [2.0, 3.0]}}, ["old"])
    assert ask("list_tenants") == before
    assert ask("apply_tenants", tenants=wanted) == told
    assert {each["name"] for each in ask("list_tenants")["data"]} == {"administrators", "same", "other", "new"}
    again = ask("apply_tenants", tenants=wanted)
    assert again == {"added": [], "changed": {}, "removed": []}


@pytest.mark.parametrize("tenants", [None, {}, [{}], [{"name": "a"}, {"name": "a"}], [{"name": "a", "x": 1}]])
def test_a_file_with_a_mistake_changes_nothing(ask: Ask, tenants: object) -> None:
    ask("add_tenant", name="kept")
    with pytest.raises(TenancyError):
        ask("apply_tenants", tenants=tenants)
    assert [each["name"] for each in ask("list_tenants")["data"]] == ["kept"]


@pytest.mark.parametrize("odd", [{"dryrun": True}, {"dry-run": True}, {"dry_run": "false"}, {"dry_run": 0}, {"x": 1}])
def test_a_dry_run_that_is_misspelt_is_no_run(ask: Ask, odd: dict[str, Any]) -> None:
    ask("add_tenant", name="kept")
    with pytest.raises(TenancyError):
        ask("apply_tenants", tenants=[], **odd)
    assert [each["name"] for each in ask("list_tenants")["data"]] == ["kept"]


def test_another_pepper_than_that_of_the_keys_is_refused(store: TenantStore, tmp_path: Path) -> None:
    with pytest.raises(TenancyError, match="not the pepper that the keys"):
        open_store(f"sqlite:///{tmp_path / 'kept.db'}", pepper_file=tmp_path / "none", environment="q" * 32)
    with pytest.raises(TenancyError, match="There is no pepper"):
        open_store(f"sqlite:///{tmp_path / 'kept.db'}", pepper_file=tmp_path / "none", environment=None)
    assert not (tmp_path / "none").exists()


def test_a_new_store_and_its_pepper_are_its_owners_alone(tmp_path: Path) -> None:
    store, _ = open_store(f"sqlite:///{tmp_path / 'new.db'}", pepper_file=tmp_path / "pepper", environment=None)
    store.close()
    assert {file.stat().st_mode & 0o077 for file in tmp_path.iterdir()} == {0}


ODD = ["\ud800", "a\x00b", "", "ключ", "a\nb", "x" * 5000, "' OR 1=1 --"]


@pytest.mark.parametrize("name", ODD)
def test_what_nobody_can_be_called_is_not_there_and_no_database_is_asked_for_it(ask: Ask, name: str) -> None:
    ask("add_tenant", name="acme")
    for service in ("show_tenant", "set_tenant", "remove_tenant"):
        with pytest.raises(NotThere) as refusal:
            ask(service, name=name)
        assert len(str(refusal.value)) < 400
        assert str(refusal.value).isascii()
    for service, arguments in (
        ("create_key", {"tenant": name}),
        ("list_keys", {"tenant": name}),
        ("rotate_key", {"id": name}),
        ("revoke_key", {"id": name}),
        ("show_usage", {"tenant": name}),
    ):
        with pytest.raises(TenancyError):
            ask(service, **arguments)
    assert [each["action"] for each in ask("list_events")["data"]] == ["add tenant"]


@pytest.mark.parametrize("huge", [pytest.param(10**400, id="digits"), 1e300, 1e18, float("inf"), float("nan")])
def test_times_and_amounts_that_nothing_can_be_reckoned_with_are_refused(ask: Ask, huge: float) -> None:
    ask("add_tenant", name="acme")
    key = ask("create_key", tenant="acme")["id"]
    for service, arguments in (
        ("create_key", {"tenant": "acme", "lifetime_s": huge}),
        ("create_admin_key", {"lifetime_s": huge}),
        ("rotate_key", {"id": key, "overlap_s": huge}),
        ("set_tenant", {"name": "acme", "limits": {"budget_per_day": huge}}),
        ("list_events", {"after": huge if isinstance(huge, float) else -huge}),
    ):
        with pytest.raises(TenancyError):
            ask(service, **arguments)
    with pytest.raises(TenancyError):
        ask("list_events", after=10**400)
    assert len(ask("list_keys")["data"]) == 1
