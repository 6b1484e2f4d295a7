"""Tenants and keys in a database."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import SQLAlchemyError

from serve_app.core.errors import Unauthenticated
from serve_app.core.tenants import Rights, Scope, Tenant
from serve_app.tenants.admin_service import AdminService
from serve_app.tenants.declaration import changed
from serve_app.tenants.errors import TenancyError
from serve_app.tenants.keys import make_pepper, new_key_id, read_pepper
from serve_app.tenants.store import LIVENESS, STILL_S, Author, TenantStore
from tests.tenants.conftest import BOTH
from tests.tenants.postgres import Server

PEPPER = b"p" * 32
on_sqlite = pytest.mark.parametrize("url", ["sqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("url", BOTH[1:], indirect=True)


def by(at: float) -> Author:
    return Author(name="test", at=at)


ACME = Tenant(name="acme", rights=Rights(("demo", "demo:*")), max_n=4, cache_group="research")


@pytest.fixture
def store(url: str) -> Iterator[TenantStore]:
    made = TenantStore(url)
    yield made
    made.close()


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(store: TenantStore) -> Ask:
    store.change_tenants(by(0.0), added=[ACME])
    admin_service = AdminService(store, PEPPER)
    return lambda service, at, **arguments: admin_service.answer(service, arguments, by(at))


def test_a_tenant_comes_back_as_it_was_kept(store: TenantStore) -> None:
    store.change_tenants(by(0.0), added=[ACME])
    store.change_tenants(by(0.0), added=[Tenant(name="beta")])
    assert store.tenants() == [ACME, Tenant(name="beta")]


def test_another_process_sees_what_was_kept(store: TenantStore, url: str) -> None:
    other = TenantStore(url)
    before = other.version
    store.change_tenants(by(0.0), added=[ACME])
    assert other.tenants() == [ACME]
    assert other.version > before
    other.close()


def test_every_change_makes_the_version_grow_and_a_refused_one_does_not(store: TenantStore, ask: Ask) -> None:
    versions = [store.version]
    changes = [
        lambda: ask("create_key", 0.0, tenant="acme"),
        lambda: ask("rotate_key", 1.0, id=store.keys()[0].id, overlap_s=5.0),
        lambda: ask("revoke_key", 2.0, id=store.keys()[0].id),
        lambda: store.change_tenants(by(0.0), changed=[Tenant(name="acme", max_n=2)]),
        lambda: store.change_tenants(by(0.0), removed=["acme"]),
    ]
    for change in changes:
        change()
        versions.append(store.version)
    assert versions == sorted(set(versions))
    with pytest.raises(TenancyError):
        store.change_tenants(by(0.0), removed=["acme"])
    assert store.version == versions[-1]


def test_a_name_is_taken_once_and_what_is_not_there_is_named(store: TenantStore, ask: Ask) -> None:
    with pytest.raises(TenancyError, match="There is a tenant 'acme' already"):
        store.change_tenants(by(0.0), added=[Tenant(name="acme")])
    for change in (
        lambda: store.change_tenants(by(0.0), changed=[Tenant(name="nobody")]),
        lambda: store.change_tenants(by(0.0), removed=["nobody"]),
    ):
        with pytest.raises(TenancyError, match="There is no tenant 'nobody'"):
            change()
    with pytest.raises(TenancyError, match="There is no tenant 'nobody'"):
        ask("create_key", 0.0, tenant="nobody")
    with pytest.raises(TenancyError, match="There is no key 'key-x'"):
        ask("revoke_key", 0.0, id="key-x")


@pytest.mark.law("Keys")
@on_sqlite
def test_the_file_holds_no_key(store: TenantStore, ask: Ask, tmp_path: Path) -> None:
    secret = ask("create_key", 0.0, tenant="acme")["key"]
    digest = store.keys()[0].digest
    store.close()
    kept = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert digest.encode() in kept
    assert secret[3:].encode() not in kept


def test_a_rotated_key_and_the_new_one_are_both_good_for_the_overlap(store: TenantStore, ask: Ask) -> None:
    old = ask("create_key", 0.0, tenant="acme", scopes=["infer", "metrics"], lifetime_s=1000.0)
    new = ask("rotate_key", 100.0, id=old["id"], overlap_s=60.0)
    directory = store.directory(PEPPER)
    assert directory.identify(old["key"], 159.0).tenant == replace(ACME, added=1)
    assert directory.identify(new["key"], 1099.0).scopes == {Scope.INFER, Scope.METRICS}
    with pytest.raises(Unauthenticated):
        directory.identify(old["key"], 160.0)
    with pytest.raises(Unauthenticated):
        directory.identify(new["key"], 1100.0)


def test_a_tenant_under_the_name_of_a_removed_one_is_another(store: TenantStore, ask: Ask) -> None:
    def own() -> str:
        return store.directory(PEPPER).tenants["acme"].own

    first = own()
    store.change_tenants(by(1.0), changed=[replace(ACME, max_n=2)])
    store.change_tenants(by(1.0), added=[Tenant(name="beta")])
    assert own() == first
    store.change_tenants(by(2.0), removed=["acme"])
    store.change_tenants(by(3.0), added=[ACME])
    assert len({first, own(), store.directory(PEPPER).tenants["beta"].own}) == 3


def test_a_revoked_key_is_not_brought_back_by_rotation(store: TenantStore, ask: Ask) -> None:
    made = ask("create_key", 0.0, tenant="acme")["id"]
    ask("revoke_key", 1.0, id=made)
    with pytest.raises(TenancyError, match="has expired or was revoked"):
        ask("rotate_key", 2.0, id=made, overlap_s=100.0)
    ask("revoke_key", 50.0, id=made)
    assert store.keys()[0].revoked_at == 1.0
    ends = [each.details["revoked_at"] for each in store.events() if each.action == "end key"]
    assert ends == [1.0, 1.0], "what came of it is written down"


def test_changes_that_come_at_once_are_all_made(ask: Ask, store: TenantStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads what it changes when nobody else changes it any more."""

    def slowly(tenant: Tenant, changes: object) -> Tenant:
        time.sleep(0.05)
        return changed(tenant, changes)

    monkeypatch.setattr("serve_app.tenants.admin_service.changed", slowly)
    changes: list[dict[str, object]] = [{"weight": 3}, {"max_tokens": 7}, {"limits": {"max_in_flight": 2}}]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda each: ask("set_tenant", 1.0, name="acme", **each), changes))
    found = store.tenant("acme")
    assert (found.weight, found.max_tokens, found.limits.max_in_flight) == (3.0, 7, 2)


def test_of_rotations_without_overlap_that_come_at_once_one_is_made(
    ask: Ask, store: TenantStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ask("create_key", 0.0, tenant="acme")["id"]

    def slowly() -> str:
        time.sleep(0.05)
        return new_key_id()

    monkeypatch.setattr("serve_app.tenants.admin_service.new_key_id", slowly)

    def rotated(_: int) -> bool:
        try:
            ask("rotate_key", 1.0, id=made, overlap_s=0.0)
        except TenancyError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(rotated, range(4))) == [False, False, False, True]
    keys = store.keys()
    assert [each.is_valid(2.0) for each in keys] == [False, True]
    assert [each.action for each in store.events()][-2:] == ["create key", "end key"]
    assert store.events()[-1].details == {"revoked_at": 1.0, "replaced_by": keys[-1].id}


@pytest.mark.parametrize("conflict", ["added", "changed", "removed", "elsewhere"])
def test_a_difference_that_cannot_be_made_any_more_leaves_nothing_half_done(
    store: TenantStore, ask: Ask, conflict: str
) -> None:
    store.change_tenants(by(0.0), added=[Tenant(name="old")])
    added, changed, version = [Tenant(name="new"), Tenant(name="newer")], [replace(ACME, weight=2)], store.version
    match conflict:
        case "added":
            store.change_tenants(by(1.0), added=[Tenant(name="newer")])
        case "changed":
            store.change_tenants(by(1.0), removed=["acme"])
        case "elsewhere":
            store.change_tenants(by(1.0), changed=[replace(ACME, max_n=9)])
        case _:
            store.change_tenants(by(1.0), removed=["old"])
    before = store.tenants(), store.events(), store.version
    with pytest.raises(TenancyError):
        store.change_tenants(by(2.0), added=added, changed=changed, removed=["old"], version=version)
    assert (store.tenants(), store.events(), store.version) == before


def test_a_difference_is_made_at_once_with_an_event_for_each(store: TenantStore, ask: Ask) -> None:
    store.change_tenants(by(0.0), added=[Tenant(name="old")])
    version = store.version
    declared = [{"name": "acme", "weight": 2}, {"name": "new"}]
    ask("apply_tenants", 2.0, tenants=declared)
    assert [(each.name, each.weight) for each in store.tenants()] == [("acme", 2.0), ("new", 1.0)]
    assert [each.action for each in store.events()][-3:] == ["add tenant", "set tenant", "remove tenant"]
    ask("apply_tenants", 3.0, tenants=declared)
    assert store.version == version + 1, "it changed once, and then not at all"


def test_a_tenant_takes_its_keys_with_it(store: TenantStore, ask: Ask) -> None:
    ask("create_key", 0.0, tenant="acme")
    store.change_tenants(by(0.0), removed=["acme"])
    assert store.keys() == []


def test_a_store_of_another_schema_is_refused(store: TenantStore, url: str) -> None:
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE facts SET value = 99 WHERE name = 'schema'")
    with pytest.raises(TenancyError, match="has schema 99; this version reads 1"):
        TenantStore(url)


@pytest.mark.parametrize("table", ["UPDATE events SET actor = 'nobody'", "DELETE FROM events"])
def test_the_database_lets_nobody_change_an_event(store: TenantStore, table: str) -> None:
    store.change_tenants(by(0.0), added=[ACME])
    before = store.events()
    with pytest.raises(SQLAlchemyError, match="events are only added"), store.engine.begin() as connection:
        connection.exec_driver_sql(table)
    assert store.events() == before != []


@on_postgresql
def test_events_are_not_emptied_out_either(store: TenantStore) -> None:
    store.change_tenants(by(0.0), added=[ACME])
    with pytest.raises(SQLAlchemyError, match="events are only added"), store.engine.begin() as connection:
        connection.exec_driver_sql("TRUNCATE events")
    assert len(store.events()) == 1


@on_postgresql
def test_a_database_that_was_started_anew_is_used_again(store: TenantStore, url: str, postgresql: Server) -> None:
    store.change_tenants(by(0.0), added=[ACME])
    postgresql.drop_connections(url)
    assert store.tenants() == [ACME]


@on_postgresql
def test_who_stands_still_in_a_transaction_does_not_keep_others_out_for_long(
    store: TenantStore, url: str, postgresql: Server
) -> None:
    """As on a host that died without a word: PostgreSQL itself would wait for two hours."""
    for _ in range(2):
        with store.engine.connect() as connection:
            assert connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar() == f"{STILL_S}s"
        postgresql.drop_connections(url)


@on_postgresql
def test_connections_know_how_long_to_wait_for_a_host_that_vanished(
    store: TenantStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libpq itself has it; what the URL or libpq's own variable says counts."""
    chosen = TenantStore(f"{url}?connect_timeout=3&tcp_user_timeout=7000")
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "4")
    by_variable = TenantStore(url)
    told = []
    for each in (store, chosen, by_variable):
        with each.engine.connect() as connection:
            told.append(connection.connection.dbapi_connection.info.get_parameters())
    chosen.close()
    by_variable.close()
    assert told.pop().get("connect_timeout", "4") == "4"
    expected = {name: str(value) for name, value in LIVENESS.items()}
    others = expected | {"connect_timeout": "3", "tcp_user_timeout": "7000"}
    assert [{name: each.get(name, "1") for name in expected} for each in told] == [expected, others]


def test_a_host_that_takes_a_connection_and_says_nothing_is_told_as_one_that_is_not_there() -> None:
    pytest.importorskip("psycopg")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(TenancyError, match="cannot be opened: connection timeout expired"):
            TenantStore(f"postgresql+psycopg://u@127.0.0.1:{port}/x?connect_timeout=2")


def test_stores_that_begin_at_once_are_one(url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: TenantStore(url), range(6)))
    stores[0].change_tenants(by(0.0), added=[ACME])
    assert [each.tenants() for each in stores] == [[ACME]] * 6
    assert {each.version for each in stores} == {2}
    for each in stores:
        each.close()


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////nowhere/at/all.db",
        "nonsense",
        "oracle://user:secret@nowhere/x",
        "postgresql+psycopg://u:secret@127.0.0.1:1/x",
    ],
)
def test_a_store_that_cannot_be_opened_is_told_without_its_password(url: str) -> None:
    with pytest.raises(TenancyError, match="cannot be opened") as refusal:
        TenantStore(url)
    assert "secret" not in str(refusal.value)


def test_a_pepper_is_made_once_and_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "pepper"
    with pytest.raises(TenancyError, match="There is no pepper"):
        read_pepper(file, None)
    make_pepper(file)
    first = read_pepper(file, None)
    make_pepper(file)
    assert read_pepper(file, None) == first
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert read_pepper(file, "e" * 32) == b"e" * 32
    with pytest.raises(TenancyError, match="at least 32 characters; found 5"):
        read_pepper(file, "short")
