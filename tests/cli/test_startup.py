"""What a cluster that starts is told by: Serve's own words, once each; and why it did not come up."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from serve_app.cli.address import Address
from serve_app.cli.log_file import LogFile, log_path, telling, told_by
from serve_app.cli.startup import Application, Events, JsonTelling, LineTelling, Startup, State, replicas_wanted
from serve_app.cli.up import lines_of_session, welcome

LOG = """\
2026-11-22 07:00:00,000 INFO worker.py:1 -- Started a local Ray instance.
\x1b[36m(ServeController pid=7)\x1b[0m ERROR 2026-11-22 -- Failed to start replica
\x1b[36m(ServeController pid=7)\x1b[0m   File "serve_app/catalog/models.py", line 60, in locate_model
\x1b[36m(ServeController pid=7)\x1b[0m serve_app.catalog.files.CatalogError: 'models/x' is not a folder
(ServeReplica:demo:Model pid=8) serve_app.catalog.files.CatalogError: 'models/x' is not a folder
an ordinary line: nothing
"""
ADDRESS = Address(host="127.0.0.1", port=8123)


def status(word: str, running: int = 0, message: str = "") -> dict[str, object]:
    return {"status": word, "message": message, "running": running, "deployments": {}}


def told(news: list[Application]) -> list[tuple[str, str, int]]:
    return [(each.name, each.state.value, each.num_running) for each in news]


def test_each_change_is_told_once() -> None:
    startup = Startup({"router": 1, "demo": 2})
    assert told(startup.update({"demo": status("DEPLOYING")})) == [("demo", "loading", 0)]
    assert startup.update({"demo": status("DEPLOYING")}) == []
    first = startup.update({"demo": status("DEPLOYING", 1), "router": status("RUNNING", 1)})
    assert told(first) == [("demo", "loading", 1), ("router", "ready", 1)]
    assert told(startup.update({"demo": status("RUNNING", 2)})) == [("demo", "ready", 2)]
    assert startup.failed == []


def test_what_cannot_be_deployed_has_failed_with_what_serve_says_of_it() -> None:
    startup = Startup({"demo": 1})
    startup.update({"demo": status("DEPLOY_FAILED", message="RuntimeError: no")})
    (failed,) = startup.failed
    assert (failed.state, failed.messages) == (State.FAILED, ("RuntimeError: no",))


def test_what_no_machine_has_room_for_is_told_once_in_serves_words(capsys: pytest.CaptureFixture[str]) -> None:
    said = "Deployment 'Model' in application 'demo' has 1 replicas that have taken more than 10s to be scheduled. …"
    waits = {**status("DEPLOYING"), "deployments": {"Model": said}}
    startup = Startup({"demo": 1})
    startup.update({"demo": status("DEPLOYING")})
    news = startup.update({"demo": waits})
    assert startup.update({"demo": waits}) == []
    LineTelling().update(news, 11.0)
    JsonTelling().update(news, 11.0)
    line, written = capsys.readouterr().out.splitlines()
    assert line.startswith(f"… demo: loading: {said} Lower what they ask for (`ray_actor_options`) or `num_replicas`")
    assert json.loads(written)["obstacle"].startswith(said)
    slow = {**waits, "deployments": {"Model": said.replace("be scheduled", "initialize")}}
    (news,) = startup.update({"demo": slow})
    assert news.obstacle is None


def test_why_a_cluster_died_is_read_in_rays_own_logs(tmp_path: Path) -> None:
    (tmp_path / "serve").mkdir()
    (tmp_path / "gcs_server.out").write_text(
        "[2026-11-26 10:00:00,000 I 7 7] (gcs_server) main.cc:1: begun\n"
        "[2026-11-26 10:00:01,000 C 7 7] (gcs_server) store.cc:9: No port is free\n"
    )
    assert lines_of_session(tmp_path) == [
        "gcs_server.out: [2026-11-26 10:00:01,000 C 7 7] (gcs_server) store.cc:9: No port is free"
    ]
    (tmp_path / "serve" / "proxy.log").write_text("INFO 2026-11-26 begun\nOSError: [Errno 99] no such address\n")
    assert lines_of_session(tmp_path) == ["serve/proxy.log: OSError: [Errno 99] no such address"]
    (tmp_path / "monitor.log").write_text("OSError: [Errno 98] Address already in use\n")
    assert lines_of_session(tmp_path) == ["serve/proxy.log: OSError: [Errno 99] no such address"]
    assert lines_of_session(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({"applications": [{"name": "demo", "deployments": [{"name": "Model", "num_replicas": 3}]}]}, {"demo": 3}),
        ({"applications": [{"name": "demo", "deployments": [{"name": "Model", "num_replicas": "auto"}]}]}, {"demo": 1}),
        ({"applications": [{"name": "demo"}, {}]}, {"demo": 1, "default": 1}),
        ({}, {}),
    ],
)
def test_as_many_replicas_are_awaited_as_the_file_says(content: dict[str, object], wanted: dict[str, int]) -> None:
    assert replicas_wanted(content) == wanted


def test_events_come_whole_however_they_are_cut() -> None:
    ours, theirs = os.pipe()
    events = Events(ours)
    text = json.dumps({"demo": status("RUNNING")}).encode() + b"\n"
    assert events.new() == []
    os.write(theirs, text[:9])
    assert events.new() == []
    os.write(theirs, text[9:] + text)
    assert len(events.new()) == 2
    os.close(theirs)
    assert events.new() == []
    events.close()


def test_the_lines_that_tell_why_are_found_once_and_without_ornaments() -> None:
    assert telling(LOG) == ["serve_app.catalog.files.CatalogError: 'models/x' is not a folder"]
    assert telling("x\nException: The current node timed out") == ["Exception: The current node timed out"]
    assert telling("OSError: [Errno 98] Address already in use") != []
    assert telling("ready: everything\nINFO: all is well") == []


def test_a_log_survives_a_full_disk_and_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "up.log"
    log = LogFile(path, max_bytes=64)
    reading, writing = os.pipe()
    taking = threading.Thread(target=log.take, args=(reading,))
    with Path("/dev/full").open("w") as full:
        log.stream.close()
        log.stream = full  # type: ignore[assignment]
        taking.start()
        os.write(writing, b"lost\n")
        while not full.closed:
            time.sleep(0.001)
    for number in range(20):
        os.write(writing, b"line %02d\n" % number)
    os.close(writing)
    taking.join()
    kept = (tmp_path / "up.log.1").read_text() + path.read_text()
    assert kept.endswith("line 18\nline 19\n")
    assert "lost" not in kept
    assert [each.stat().st_mode & 0o777 for each in sorted(tmp_path.iterdir())] == [0o600, 0o600]
    assert max(each.stat().st_size for each in tmp_path.iterdir()) <= 64


def test_a_log_that_names_no_error_is_told_by_its_end(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    assert told_by(log)[-1] == "line 99"
    assert told_by(log, ["ValueError: of Serve's own message"]) == ["ValueError: of Serve's own message"]
    assert told_by(None) == []


def test_a_log_is_this_users_and_the_one_before_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = log_path(ADDRESS)
    assert path == tmp_path / "serve_app" / "up-8123.log"
    assert path.parent.stat().st_mode & 0o077 == 0
    path.write_text("before")
    assert log_path(ADDRESS) == path
    assert (path.parent / "up-8123.log.1").read_text() == "before"
    assert log_path(ADDRESS, "-") is None
    assert log_path(ADDRESS, str(tmp_path / "new" / "own.log")) == tmp_path / "new" / "own.log"


def test_lines_and_json_tell_the_same_start(capsys: pytest.CaptureFixture[str]) -> None:
    for teller in (LineTelling(), JsonTelling()):
        startup = Startup({"demo": 2})
        teller.begin(list(startup.applications.values()), "up.log")
        teller.update(startup.update({"demo": status("DEPLOYING", 1)}), 1.5)
        teller.ready("http://127.0.0.1:1", 2.0, "Ready on http://127.0.0.1:1")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "Loading demo; what Ray says is in up.log",
        "… demo: loading, 1 of 2 replicas (1.5 s)",
        "Ready on http://127.0.0.1:1",
    ]
    events = [json.loads(line) for line in lines[3:]]
    assert [each["event"] for each in events] == ["starting", "application", "ready"]
    assert (events[1]["state"], events[1]["seconds"]) == ("loading", 1.5)
    assert (events[2]["url"], events[2]["console"]) == ("http://127.0.0.1:1", "http://127.0.0.1:1/console")


@pytest.mark.parametrize("store", [None, "sqlite:///keys.db"])
def test_what_is_ready_is_tried_by_a_browser_and_by_commands(tmp_path: Path, store: str | None) -> None:
    router = {"name": "router", "args": {"store": store} if store else {}}
    content = {"applications": [router, {"name": "small", "args": {"name": "small", "path": "x"}}]}
    (tmp_path / "cluster.yaml").write_text(json.dumps(content))
    said = welcome(ADDRESS, tmp_path / "cluster.yaml")
    assert "\n  http://127.0.0.1:8123/console\n" in said
    assert '"model": "small"' in said
    assert ("authorization: Bearer" in said) is (store is not None)
