"""Tenants and keys by the command line, over a real store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from serve_app.cli.exits import Exit
from serve_app.core.ledger import Row
from serve_app.tenants.ledger import LedgerStore
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
        (["usage", "--since", "2026-13-99"], Exit.FAILED, "since must be a day like 2026-11-22; found '2026-13-99'"),
        (["tenants", "remove", "nobody"], Exit.FAILED, "nobody"),
        (["tenants", "apply", "missing.yaml"], Exit.FAILED, "missing.yaml cannot be read"),
        (["usage", "--file", "none.yaml"], Exit.FAILED, "names no store: set `store:"),
    ],
)
def test_what_cannot_be_done_is_told_with_what_would_do(
    run: CommandLine, words: list[str], code: Exit, told: str
) -> None:
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
    assert run("events").out.strip() == "Nothing was changed."
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
    monkeypatch.setattr("serve_app.tenants.office.MOST_EVENTS", 1)
    assert run("events").out.splitlines()[-1] == "There are more: --after 1"
    assert run("events", "--after", "-1").code == Exit.FAILED


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
    assert run("usage").code == Exit.DONE
    assert run("usage", "--json").json["data"] == []
    header = "tenant,model,day,requests,prompt_tokens,cached_tokens,completion_tokens,choices,engine_seconds,cost"
    assert run("usage", "--csv").out.strip() == header, "nobody has used anything"
