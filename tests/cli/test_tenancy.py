"""Tenants and keys by the command line, over a real store."""

from __future__ import annotations

import json
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from serve_app.cli.screen import Exit
from serve_app.core.ledger import Row
from serve_app.tenants.ledger import LedgerStore
from serve_app.tenants.opening import open_store
from tests.cli.runs import end, new_run, start
from tests.cli.served import CommandLine


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """In a folder with a cluster file that names a store."""
    (tmp_path / "cluster.yaml").write_text(
        "applications:\n- name: router\n  import_path: serve_app.deployments.apps:router\n"
        "  args: {store: 'sqlite:///kept.db', pepper: pepper}\n"
    )
    monkeypatch.chdir(tmp_path)
    return CommandLine("http://127.0.0.1:1", monkeypatch, capsys)


def test_what_is_said_of_a_tenant_is_what_is_kept(run: CommandLine) -> None:
    added = run("tenants", "add", "acme", "--models", "demo", "demo:*", "--max-tokens", "64", "--weight", "2", "--json")
    assert added.code == Exit.DONE
    assert (added.json["models"], added.json["max_tokens"], added.json["weight"]) == (["demo", "demo:*"], 64, 2.0)
    changed = run(
        "tenants", "set", "acme", "--models", "--max-tokens", "none", "--budget-per-day", "2.5", "--json"
    ).json
    assert (changed["models"], changed["max_tokens"], changed["weight"]) == ([], None, 2.0)
    assert changed["limits"]["budget_per_day"] == 2.5
    assert run("tenants", "set", "acme", "--weight", "3", "--json").json["models"] == []
    assert run("tenants", "list").out.startswith("acme  (no model)")


def test_who_has_a_number_and_no_name_administers_too(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as any user."""

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4242")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert run("tenants", "add", "acme").code == Exit.DONE


def test_a_list_ends_where_the_next_option_begins(run: CommandLine) -> None:
    kept = run("tenants", "add", "acme", "--cors-origins", "https://a.example", "--models", "demo", "--json").json
    assert (kept["cors_origins"], kept["models"]) == (["https://a.example"], ["demo"])


def test_a_key_is_made_exchanged_and_revoked(run: CommandLine) -> None:
    run("tenants", "add", "acme")
    made = run("keys", "create", "acme", "--scopes", "infer", "metrics", "--days", "2", "--json").json
    assert made["scopes"] == ["infer", "metrics"]
    assert made["key"].startswith("sa-")
    other = run("keys", "rotate", made["id"], "--overlap-hours", "0", "--json").json
    assert run("keys", "revoke", other["id"]).code == Exit.DONE
    assert len(json.loads(run("keys", "list", "--tenant", "acme", "--json").out)["data"]) == 2
    assert run("keys", "create", "--admin").code == Exit.DONE


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["keys", "create"], Exit.MISUSED, "name one of them"),
        (["keys", "create", "acme", "--admin"], Exit.MISUSED, "name one of them"),
        (["keys", "create", "--admin", "--scopes", "infer"], Exit.MISUSED, "leave --scopes out"),
        (["keys", "create", "nobody"], Exit.FAILED, "nobody"),
        (
            ["tenants", "add", "acme", "--max-n", "many"],
            Exit.MISUSED,
            "--max-n must be an integer, or none; found 'many'",
        ),
        (
            ["tenants", "add", "acme", "--weight", "none"],
            Exit.MISUSED,
            "--weight must be a number; found 'none'",
        ),
        (["usage", "--since", "2026-13-99"], Exit.MISUSED, "--since must be today, yesterday or a day like 2026-11-22"),
        (["usage", "--until", "tomorrow"], Exit.MISUSED, "found 'tomorrow'"),
        (["tenants", "remove", "nobody"], Exit.FAILED, "nobody"),
        (["tenants", "apply", "missing.yaml"], Exit.FAILED, "missing.yaml cannot be read"),
        (["usage", "--file", "none.yaml"], Exit.FAILED, "names no store: set `store:"),
    ],
)
def test_what_cannot_be_done_is_told_with_what_would_do(
    run: CommandLine, words: list[str], code: Exit, told: str
) -> None:
    run("tenants", "add", "kept")
    ran = run(*words)
    assert (ran.code, ran.out) == (code, "")
    assert told in ran.err


def test_a_file_is_told_as_a_difference_first_and_then_applied(run: CommandLine) -> None:
    run("tenants", "add", "acme", "--weight", "2")
    run("tenants", "add", "gone")
    Path("tenants.yaml").write_text("tenants:\n- {name: acme, weight: 3}\n- {name: beta, max_n: 4}\n")
    expected = ["+ beta  *  standard  weight=1  max_n=4", "~ acme: weight 2.0 → 3.0", "- gone, with its keys"]
    for words in (["--dry-run"], []):
        ran = run("tenants", "apply", "tenants.yaml", *words)
        assert (ran.code, ran.out.splitlines()) == (Exit.DONE, expected)
    assert [line.split()[0] for line in run("tenants", "list").out.splitlines()] == ["acme", "beta"]
    assert run("tenants", "apply", "tenants.yaml").out.strip() == "Nothing differs."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants:\n- name: a\ntenants:\n- name: b\n", "tenants.yaml:3 'tenants' is given twice, first on line 1"),
        ("tenants:\n- name: a\n  models: [demo]\n  models: ['*']\n", "tenants.yaml:4 'models' is given twice"),
        ("tenants: [\n", "tenants.yaml:2 cannot be read"),
    ],
)
def test_a_file_that_says_something_twice_changes_nothing(run: CommandLine, text: str, said: str) -> None:
    run("tenants", "add", "kept")
    Path("tenants.yaml").write_text(text)
    ran = run("tenants", "apply", "tenants.yaml")
    assert ran.code == Exit.FAILED
    assert said in ran.err
    assert run("tenants", "list").out.startswith("kept")


def test_who_changed_what_is_told(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    run("tenants", "add", "acme")
    made = run("keys", "create", "acme", "--json").json
    lines = run("events").out.splitlines()
    assert [line.split("  ")[2:5] for line in lines] == [
        ["command line of ann", "add tenant", "acme"],
        ["command line of ann", "create key", made["id"]],
    ]
    assert made["key"] not in "".join(lines)
    assert [each["id"] for each in run("events", "--after", "1", "--json").json["data"]] == [2]
    monkeypatch.setattr("serve_app.tenants.admin_service.MOST_EVENTS", 1)
    assert run("events").out.splitlines()[-1] == "There are more: --after 1"
    assert run("events", "--after", "-1").code == Exit.FAILED
    assert run("events", "--after", "2").out.strip() == "Nothing was changed."


def test_usage_of_some_is_told_by_what_is_asked_for(run: CommandLine) -> None:
    run("tenants", "add", "acme")
    ledger = LedgerStore(create_engine("sqlite:///kept.db"))
    row = Row(
        id="0", tenant="acme", key_id="key", request_id="r", model="demo", at=1.8e9, completion_tokens=7, cost=5 * 10**8
    )
    rows = [replace(row, id=f"{name}/{at}", tenant=name) for name in ("acme", "beta") for at in (0, 1)]
    ledger.record(rows, (), 1.8e9)
    ledger.engine.dispose()
    (line,) = run("usage", "--by", "tenant,model", "--tenant", "acme").out.splitlines()
    assert {"tenant=acme", "model=demo", "requests=2", "completion_tokens=14", "cost=1.0"} <= set(line.split("  "))
    assert [each["tenant"] for each in run("usage", "--by", "tenant", "--json").json["data"]] == ["acme", "beta"]
    assert len(run("usage", "--csv").out.strip().splitlines()) == 3
    assert run("usage", "--until", "2001-01-01").out.strip() == "Nothing was used."


def test_usage_is_told_to_persons_programs_and_spreadsheets(run: CommandLine) -> None:
    run("tenants", "add", "acme")
    assert run("usage", "--since", "yesterday", "--until", "today").out.strip() == "Nothing was used."
    assert run("usage", "--json").json["data"] == []
    header = "tenant,model,day,requests,prompt_tokens,cached_tokens,completion_tokens,choices,engine_seconds,cost"
    assert run("usage", "--csv").out.strip() == header, "nobody has used anything"


@pytest.mark.parametrize(
    "words",
    [
        ["keys", "list"],
        ["keys", "revoke", "key-x"],
        ["keys", "rotate", "key-x"],
        ["keys", "backup", "copy.db"],
        ["tenants", "list"],
        ["tenants", "set", "acme", "--weight", "2"],
        ["tenants", "remove", "acme"],
        ["tenants", "apply", "--dry-run"],
        ["usage", "--since", "yesterday"],
        ["events"],
    ],
)
def test_a_command_that_only_looks_or_changes_makes_no_store(
    run: CommandLine, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "tenants.yaml").write_text("tenants: []\n")
    before = set(tmp_path.iterdir())
    ran = run(*words)
    assert (ran.code, ran.out) == (Exit.FAILED, "")
    assert f"There is no store of tenants at {tmp_path / 'kept.db'}" in ran.err
    assert set(tmp_path.iterdir()) == before


def test_a_store_that_begins_is_told_and_none_begins_beside_a_service_that_runs(
    run: CommandLine, tmp_path: Path
) -> None:
    service = start(new_run(file="cluster.yaml"), "")
    try:
        ran = run("keys", "create", "--admin")
        assert ran.code == Exit.FAILED
        assert "a service of cluster.yaml runs that has it open" in ran.err
        assert not (tmp_path / "kept.db").exists()
    finally:
        end(service)
    ran = run("keys", "create", "--admin")
    assert ran.code == Exit.DONE
    assert f"this begins a new store, {tmp_path / 'kept.db'}, with its pepper, {tmp_path / 'pepper'}" in ran.err
    assert run("keys", "list").err == ""


def test_a_copy_of_a_store_that_is_open_is_the_store(run: CommandLine, tmp_path: Path) -> None:
    run("keys", "create", "--admin")
    store, _ = open_store("sqlite:///kept.db", pepper_file=Path("pepper"), environment=None)
    run("tenants", "add", "acme", "--weight", "3")
    made = run("keys", "create", "acme", "--json").json
    assert (tmp_path / "kept.db-wal").stat().st_size > 0, "what was written last is beside the file"
    assert run("keys", "backup", "copy.db", "--json").json == {"store": "kept.db", "copy": "copy.db"}
    assert stat.S_IMODE(Path("copy.db").stat().st_mode) == 0o600
    store.close()
    kept = [run(*words, "--json").json for words in (["keys", "list"], ["tenants", "list"], ["events"])]
    for end_of in ("", "-wal", "-shm"):
        Path(f"kept.db{end_of}").unlink(missing_ok=True)
    assert run("keys", "list").code == Exit.FAILED
    Path("copy.db").rename("kept.db")
    assert [run(*words, "--json").json for words in (["keys", "list"], ["tenants", "list"], ["events"])] == kept
    store, pepper = open_store("sqlite:///kept.db", pepper_file=Path("pepper"), environment=None)
    assert store.directory(pepper).identify(made["key"], time.time()).tenant.name == "acme"
    store.close()
    ran = run("keys", "backup", "kept.db")
    assert "kept.db is there already; name a new file" in ran.err


def test_a_store_without_its_driver_is_told_with_the_command_that_installs_it(
    run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    file = tmp_path / "cluster.yaml"
    sound = file.read_text()
    for scheme, told in (
        ("postgresql+psycopg", "its driver, psycopg, is not installed"),
        ("postgresql+psycopg2", "the driver psycopg2 is not installed; for PostgreSQL write `postgresql+psycopg://…`"),
        ("postgresql+pg8000", "the driver pg8000 is not installed"),
        ("mysql", "is not installed"),
    ):
        file.write_text(sound.replace("sqlite:///kept.db", f"{scheme}://u:secret@host/name"))
        for words in (["keys", "list"], ["keys", "create", "--admin"], ["usage"], ["events"], ["keys", "backup", "x"]):
            ran = run(*words)
            assert (ran.code, ran.out) == (Exit.FAILED, "")
            assert told in ran.err
            assert "pip install -c constraints.txt -e '.[postgresql]'" in ran.err
        ran = run("check", "cluster.yaml")
        assert ran.code == Exit.FAILED
        assert "error: applications[0].args.store: The store of tenants cannot be opened" in ran.out
        assert told in ran.out
        assert "secret" not in ran.out + ran.err
