"""Adapters published by the command line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from serve_app.cli.screen import Exit
from serve_app.core.tenants import Identity, Rights, Scope, Tenant
from serve_app.http.guard import Door
from tests.cli.served import CommandLine, serving
from tests.flow.test_publishing import adapter_at

ACME = Tenant(name="acme", publishes=Rights(("demo:acme-*",)))


def test_a_version_is_published_replaced_rolled_back_and_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = adapter_at(tmp_path, "one"), adapter_at(tmp_path, "two", b"v2")
    with serving(adapters_root=str(tmp_path)) as served:
        run = CommandLine(served.url, monkeypatch, capsys)
        published = run("adapters", "publish", "demo:sql", first)
        assert (published.code, published.out) == (
            Exit.DONE,
            f"demo:sql is version {version_of(run, 'demo:sql')} on 1 of 1 replicas.\n",
        )
        before = version_of(run, "demo:sql")
        refused = run("adapters", "publish", "demo:sql", second)
        assert (refused.code, "already been loaded" in refused.err) == (Exit.REFUSED, True)
        monkeypatch.chdir(tmp_path)
        replaced = run("adapters", "publish", "sql", "two", "--in-place")
        assert f"Before it was {before}: `serve_app adapters rollback demo:sql`" in replaced.out
        rows = [row.split("\t") for row in run("adapters", "versions").out.splitlines()]
        assert [(row[0], row[2], row[4], row[5]) for row in rows] == [
            ("demo:pirate", "", "", "1 of 1"),
            ("demo:shout", "", "", "1 of 1"),
            ("demo:sql", before, "operator", "1 of 1"),
        ]
        assert rows[0][3] == "in its folder"
        assert rows[2][3].startswith(time.strftime("%Y-", time.gmtime()))
        assert run("adapters", "rollback", "sql", "--json").json["version"].startswith(before)
        assert run("adapters", "withdraw", "demo:sql", "--json").json == {"withdrawn": "demo:sql"}
        gone = run("adapters", "withdraw", "demo:sql")
        assert (gone.code, "cannot be found" in gone.err) == (Exit.REFUSED, True)
        outside = run("adapters", "publish", "demo:sql", "/etc")
        assert (outside.code, "Allowed are" in outside.err) == (Exit.REFUSED, True)


def test_a_canary_is_published_listed_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = adapter_at(tmp_path, "one"), adapter_at(tmp_path, "two", b"v2")
    with serving(adapters_root=str(tmp_path)) as served:
        run = CommandLine(served.url, monkeypatch, capsys)
        run("adapters", "publish", "demo:sql", first)
        before = version_of(run, "demo:sql")
        tried = run("adapters", "publish", "demo:sql", second, "--canary", "2.5%")
        assert f"demo:sql is version {before}" in tried.out
        assert "at 2.5% of requests (0 requests, 0 failed): `serve_app adapters rollback demo:sql` ends it" in tried.out
        rows = [row.split("\t") for row in run("adapters", "versions").out.splitlines()]
        assert [row[6].partition(" at ")[2] for row in rows] == ["", "", "2.5% of requests (0 requests, 0 failed)"]
        refused = run("adapters", "publish", "demo:sql", second, "--canary", "200%")
        assert (refused.code, "below 100%" in refused.err) == (Exit.REFUSED, True)
        assert run("adapters", "rollback", "demo:sql", "--json").json["canary"] is None


def test_a_tenants_key_publishes_by_the_route_that_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = Identity(tenant=ACME, key_id="key-1", scopes=frozenset({Scope.ADAPTERS_WRITE}))
    folder = adapter_at(tmp_path, "one")
    with serving(Door(identify=lambda key: identity), adapters_root=str(tmp_path)) as served:
        run = CommandLine(served.url, monkeypatch, capsys)
        published = run("adapters", "publish", "demo:acme-sql", folder)
        assert "'demo:acme-sql' added successfully" in published.out
        assert run("adapters", "publish", "demo:sql", folder).code == Exit.REFUSED
        assert "removed successfully" in run("adapters", "withdraw", "demo:acme-sql", "--json").json["said"]
        assert run("adapters", "versions").code == Exit.REFUSED


def version_of(run: CommandLine, name: str) -> str:
    entries = run("adapters", "versions", "--json").json["data"]
    return str(next(each["version"] for each in entries if each["id"] == name))[:12]
