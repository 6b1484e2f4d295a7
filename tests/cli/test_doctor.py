"""The doctor finds each thing that is wrong, and nothing where nothing is."""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

from serve_app.check.document import Severity
from serve_app.cli import main
from serve_app.cli.doctor import report
from serve_app.cli.doctor.gathering import (
    ILL,
    NOT_SEEN,
    SOUND,
    SUSPECT,
    Facts,
    Listener,
    SecretFile,
    exit_code_of,
    gather,
    routes,
)
from serve_app.cli.doctor.report import CHECKS, examine, lines_of, object_of
from serve_app.cli.processes import Process
from serve_app.core.tenants import Limits, Tenant
from serve_app.tenants.admin_service import AdminService
from serve_app.tenants.opening import Inspection, PepperState, inspect_store, open_store
from serve_app.tenants.store import Author
from tests.cli.runs import needs_proc
from tests.ports import held_port

PEPPER = "p" * 32
JOBS = "http://127.0.0.1:8265/api/jobs/"


def process(program: str, command: str = "") -> Process:
    return Process(pid=1, program=program, command=command or program, run=None)


def listens(address: str, port: int, program: str, command: str = "") -> Listener:
    return Listener(address=address, port=port, holder=process(program, command))


STORE = Inspection(
    shown="sqlite:///kept.db",
    backend="sqlite",
    journal_mode="wal",
    mode=0o600,
    file=Path("kept.db"),
    pepper=PepperState(source="file", mode=0o600),
    tenants=(Tenant(name="acme", limits=Limits(tokens_per_minute=1000)),),
)
SOUND_FACTS = Facts(
    url="http://127.0.0.1:8000",
    environment={"RAY_AUTH_MODE": "token"},
    listeners=(
        listens("127.0.0.1", 8000, "ray::ProxyActor"),
        listens("127.0.0.1", 8265, "python", "python dashboard.py"),
        listens("::ffff:7f00:1", 6379, "gcs_server"),
        listens("::1", 9101, "haproxy"),
    ),
    anonymous=dict.fromkeys(routes(), 401),
    ray_answers={JOBS: 401},
    store=STORE,
    token=SecretFile(path="token", mode=0o600, is_open=False),
)


def outside(facts: Facts) -> Facts:
    return replace(facts, listeners=(listens("0.0.0.0", 8000, "ray::ProxyActor"),))


def unasked(facts: Facts) -> Facts:
    return replace(facts, anonymous=dict.fromkeys(routes(), 200), store=None)


def kept(**changes: Any) -> Facts:
    return replace(SOUND_FACTS, store=replace(STORE, **changes))


def listening(*more: Listener, **changes: Any) -> Facts:
    return replace(SOUND_FACTS, listeners=(*SOUND_FACTS.listeners, *more), **changes)


DASHBOARD = listens("0.0.0.0", 8265, "python", "python dashboard.py")
REPLICA = listens("::", 40000, "ray::ServeReplica:demo:Model")
LOGGED = Tenant(name="acme", log_texts=0.5)
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

FOUND: list[tuple[Facts, str, Severity, str]] = [
    (unasked(outside(SOUND_FACTS)), "bind", ERROR, "0.0.0.0:8000"),
    (outside(SOUND_FACTS), "tls", WARNING, "without TLS"),
    (replace(SOUND_FACTS, doubt="self-signed certificate"), "tls", WARNING, "is not trusted here: self-signed"),
    (
        replace(SOUND_FACTS, anonymous={("GET", "/metrics"): 200, ("GET", "/v1/models"): 401}),
        "routes",
        ERROR,
        "/metrics",
    ),
    (replace(SOUND_FACTS, anonymous=dict.fromkeys(routes(), 200)), "routes", ERROR, "routes answer somebody without"),
    (kept(tenants=(LOGGED,)), "texts", NOTE, "of acme are logged, 0.5"),
    (
        replace(kept(tenants=(LOGGED,)), open_logs=("/s/logs/worker-1.err",)),
        "texts",
        ERROR,
        "others may read these texts: 1 logs of Ray's are open to them, /s/logs/worker-1.err among them",
    ),
    (replace(SOUND_FACTS, environment={"RAY_AUTH_MODE": "disabled"}), "ray-token", WARNING, "RAY_AUTH_MODE=disabled"),
    (listening(DASHBOARD, environment={"X": "1"}), "ray-token", ERROR, "(not set)"),
    (replace(SOUND_FACTS, token=SecretFile(path="t", mode=0o644, is_open=True)), "ray-token", ERROR, "mode 644"),
    (
        replace(SOUND_FACTS, ray_answers={"http://127.0.0.1:8265/api/jobs/": 200}),
        "ray-dashboard",
        WARNING,
        "/api/jobs/",
    ),
    (listening(DASHBOARD, ray_answers={"http://127.0.0.1:8265/api/jobs/": 200}), "ray-dashboard", ERROR, "runs code"),
    (listening(DASHBOARD), "ray-dashboard", WARNING, "0.0.0.0:8265"),
    (listening(REPLICA), "ray-ports", NOTE, "want its token"),
    (listening(REPLICA, environment={"RAY_AUTH_MODE": "disabled"}), "ray-ports", ERROR, "without its token"),
    (listening(listens("0.0.0.0", 8404, "haproxy")), "haproxy", WARNING, "8404"),
    (kept(problem="there is no file kept.db"), "store", ERROR, "there is no file"),
    (kept(has_password=True), "store", ERROR, "has a password"),
    (kept(journal_mode="delete"), "store", WARNING, "journal mode delete"),
    (kept(mode=0o644), "store", WARNING, "mode 644"),
    (kept(pepper=PepperState(source="none")), "pepper", ERROR, "there is no pepper"),
    (kept(pepper=PepperState(source="file", mode=0o600, problem="it is not the one")), "pepper", ERROR, "not the one"),
    (kept(pepper=PepperState(source="file", mode=0o640)), "pepper", ERROR, "mode 640"),
    (kept(pepper=PepperState(source="file", mode=0o600, is_beside_store=True)), "pepper", NOTE, "one copy"),
]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert examine(SOUND_FACTS) == []
    assert exit_code_of([], was_seen=True) == SOUND
    assert len(list(lines_of(SOUND_FACTS, []))) == len(CHECKS) + 2


@pytest.mark.parametrize(
    ("facts", "check", "severity", "said"), FOUND, ids=lambda each: each if isinstance(each, str) else ""
)
def test_each_wrong_is_found_with_what_mends_it(facts: Facts, check: str, severity: Severity, said: str) -> None:
    found = [each for each in examine(facts) if each.check == check]
    (verdict,) = [each for each in found if said in each.found]
    assert verdict.severity is severity
    assert verdict.mend.endswith(".")
    assert verdict.commands
    assert exit_code_of(found, was_seen=True) in {ERROR: (ILL,), WARNING: (SUSPECT,), NOTE: (SOUND,)}[severity]
    told = "\n".join(lines_of(facts, found))
    assert verdict.mend in told
    assert all(f"$ {command}" in told for command in verdict.commands)


def test_every_verdict_that_a_check_may_give_is_given_to_something_that_is_tried() -> None:
    places = {
        (report.__file__, node.lineno)
        for node in ast.walk(ast.parse(inspect.getsource(report)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("error", "warning", "note", "verdict")
    }
    passed: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        passed.add((frame.f_code.co_filename, frame.f_lineno))
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        told = {each.check for facts, *_ in FOUND for each in examine(facts)}
    finally:
        sys.settrace(before)
    assert places - passed == set()
    assert told == {each.name for each in CHECKS}


def test_a_proxy_that_is_full_lets_nobody_in() -> None:
    facts = replace(SOUND_FACTS, anonymous=SOUND_FACTS.anonymous | {("POST", "/v1/completions"): 503})  # type: ignore[operator]
    assert examine(facts) == []


def test_what_could_not_be_seen_is_neither_sound_nor_ill() -> None:
    assert examine(Facts()) == []
    assert exit_code_of([], was_seen=False) == NOT_SEEN
    told = list(lines_of(Facts(), []))
    assert "nothing answers there" in told[0]
    assert not any("nobody submits jobs" in line for line in told)
    looked_at = {
        each["name"]: each["was_looked_at"]
        for each in json.loads(json.dumps(object_of(Facts(), [], NOT_SEEN)))["checks"]
    }
    assert (looked_at["store"], looked_at["bind"]) == (True, False)


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a cluster file whose port nobody listens on, and a store with its pepper."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SERVE_APP_PEPPER", raising=False)
    content = yaml.safe_load((Path(__file__).parents[2] / "cluster.yaml").read_text(encoding="utf-8"))
    content["applications"] = content["applications"][:1]
    content["applications"][0]["args"]["store"] = "sqlite:///kept.db"
    content["applications"][0]["deployments"][0]["user_config"]["auth"] = "keys"
    with held_port() as content["http_options"]["port"]:
        Path("cluster.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        yield tmp_path


def make_store() -> None:
    store, pepper = open_store("sqlite:///kept.db", pepper_file=Path("serve_app.pepper"), environment=None)
    AdminService(store, pepper).answer("create_admin_key", {}, Author(name="test", at=0.0))
    store.close()


def test_the_doctor_makes_nothing_and_changes_nothing(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == ILL
    assert "there is no file kept.db" in capsys.readouterr().out
    assert [each.name for each in house.iterdir()] == ["cluster.yaml"]
    make_store()
    before = {each.name: each.read_bytes() for each in house.iterdir()}
    assert main(["doctor", "--json"]) == NOT_SEEN
    assert {each.name: each.read_bytes() for each in house.iterdir()} == before
    out = capsys.readouterr().out
    assert out.count("\n") == 1, "on one line for a program"
    told = json.loads(out)
    found = {(check["name"], each["severity"]) for check in told["checks"] for each in check["findings"]}
    assert found == {("pepper", "note")}


def test_files_that_others_may_open_and_a_wrong_pepper_are_seen(house: Path) -> None:
    make_store()
    os.chmod("kept.db", 0o644)
    os.chmod("serve_app.pepper", 0o604)
    facts = gather("cluster.yaml")
    assert facts.store is not None
    assert facts.store.mode is not None
    assert (facts.store.mode & 0o077, facts.store.pepper.mode) == (0o044, 0o604)
    Path("serve_app.pepper").write_text("another pepper, of 32 characters or more")
    assert "not the one" in str(gather("cluster.yaml").store)
    Path("serve_app.pepper").unlink()
    assert {"store", "pepper"} <= {each.check for each in examine(gather("cluster.yaml"))}


@pytest.mark.parametrize("url", ["nonsense", "postgresql+psycopg://u:secret@127.0.0.1:1/x", "sqlite:////no/where.db"])
def test_a_store_that_cannot_be_read_is_told_without_its_password(url: str, tmp_path: Path) -> None:
    found = inspect_store(url, pepper_file=tmp_path / "none", environment=None)
    assert found.problem
    assert "secret" not in str(found)


def test_a_store_whose_journal_is_another_is_seen_and_left_so(house: Path) -> None:
    import sqlite3

    make_store()
    with sqlite3.connect("kept.db") as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    found = inspect_store("sqlite:///kept.db", pepper_file=Path("serve_app.pepper"), environment=None)
    assert found.journal_mode == "delete"
    again = inspect_store("sqlite:///kept.db", pepper_file=Path("serve_app.pepper"), environment=None)
    assert again.journal_mode == "delete", "to look at it changes nothing"


def test_a_database_that_is_no_store_is_told_and_not_made_one(house: Path) -> None:
    Path("kept.db").touch()
    found = inspect_store("sqlite:///kept.db", pepper_file=Path("none"), environment=None)
    assert "no such table" in str(found.problem)
    assert Path("kept.db").read_bytes() == b""


class Careless(BaseHTTPRequestHandler):
    """Answers everything to everybody."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *said: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[[str], int]]:
    servers: list[ThreadingHTTPServer] = []

    def begin(host: str) -> int:
        servers.append(ThreadingHTTPServer((host, 0), Careless))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1].server_port

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


@needs_proc
def test_a_careless_service_is_seen_for_what_it_is(house: Path, serve: Callable[[str], int]) -> None:
    make_store()
    content = yaml.safe_load(Path("cluster.yaml").read_text())
    content["http_options"] |= {"host": "127.0.0.1", "port": serve("127.0.0.1")}
    Path("cluster.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    facts = gather("cluster.yaml")
    assert [(each.port, each.is_outside) for each in facts.doors] == [(content["http_options"]["port"], False)]
    assert {each.check for each in examine(facts)} >= {"routes"}
