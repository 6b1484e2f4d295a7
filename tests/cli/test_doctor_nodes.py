"""The doctor tells what of a cluster's nodes differs, and finds nothing where nothing does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.check.document import Severity
from serve_app.cli.doctor.differences import Seen, examine, line_of, place_of_store, question_of
from serve_app.cli.doctor.nodes import PIECE_BYTES, PIECES, WHOLE_BYTES, Node, digest_of, versions

CONTENT: dict[str, Any] = {
    "http_options": {"host": "10.0.0.1", "port": 8000},
    "applications": [
        {"args": {"store": "postgresql+psycopg://user@db/name"}},
        {"args": {"name": "demo", "path": "/models/demo", "adapters": "/adapters"}},
    ],
}


def node(name: str, **facts: Any) -> Node:
    seen = {
        "versions": {"torch": "2.13.0"},
        "environment": {"RAY_AUTH_MODE": "token", "RAY_REDIS_ADDRESS": "db:6379"},
        "folders": {"/models/demo": "aa", "/adapters": "bb"},
        "pepper": "cc",
        "free_memory": 8 << 30,
        "free_disk": 50 << 30,
        "disk": 100 << 30,
    }
    return Node(name=name, address=f"10.0.0.{len(name)}", num_cpus=2.0, **{**seen, **facts})


HEAD, WORKER = replace(node("head"), is_head=True), node("worker")


def found(*nodes: Node, content: dict[str, Any] = CONTENT) -> list[tuple[str, Severity]]:
    return [(each.check, each.severity) for each in examine(Seen(nodes=nodes, content=content))]


def test_where_nothing_differs_nothing_is_found() -> None:
    assert found(HEAD, WORKER) == []


@pytest.mark.parametrize(
    ("change", "check", "severity"),
    [
        ({"silence": "No module named 'serve_app'"}, "silent", Severity.ERROR),
        ({"versions": {"torch": "2.13.1"}}, "versions", Severity.ERROR),
        ({"environment": {"RAY_AUTH_MODE": ""}}, "environment", Severity.ERROR),
        ({"folders": {"/models/demo": "", "/adapters": "bb"}}, "folders", Severity.ERROR),
        ({"folders": {"/models/demo": "aa", "/adapters": "dd"}}, "folders", Severity.ERROR),
        ({"pepper": ""}, "store", Severity.ERROR),
        ({"pepper": "dd"}, "store", Severity.ERROR),
        ({"unreached": ("the store at db:5432 (refused)",)}, "reach", Severity.ERROR),
        ({"ahead_s": -3.0}, "clocks", Severity.WARNING),
        ({"free_disk": 4 << 30}, "disks", Severity.WARNING),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_thing_that_one_node_has_otherwise_is_found_alone(
    change: dict[str, Any], check: str, severity: Severity
) -> None:
    assert found(HEAD, replace(WORKER, **change)) == [(check, severity)]


def test_who_has_what_is_told_and_where_files_are_missing() -> None:
    other = replace(WORKER, versions={"torch": "2.13.1"}, folders={"/models/demo": "", "/adapters": "bb"})
    told = [each.found for each in examine(Seen(nodes=(HEAD, other), content=CONTENT))]
    assert told == ["torch: 2.13.0 on head; 2.13.1 on worker", "/models/demo is not on worker"]


def test_a_head_without_cpus_needs_no_models() -> None:
    assert found(replace(HEAD, num_cpus=0.0, folders={"/models/demo": "", "/adapters": ""}, pepper=""), WORKER) == []


def test_what_a_file_says_that_serves_one_machine_alone_is_found() -> None:
    content = {
        "http_options": {"host": "127.0.0.1"},
        "applications": [{"args": {"store": "sqlite:///kept.db", "path": "models/demo"}}],
    }
    assert question_of(content).folders == ("models/demo",)
    assert place_of_store(content) is None
    assert place_of_store(CONTENT) == ("db", 5432)
    nodes = [replace(each, environment={}, folders={"models/demo": "aa"}) for each in (HEAD, WORKER)]
    assert found(*nodes, content=content) == [
        ("folders", Severity.WARNING),
        ("store", Severity.ERROR),
        ("reach", Severity.WARNING),
        ("head", Severity.NOTE),
    ]


def test_a_silent_node_has_a_line_and_no_figures() -> None:
    assert line_of(replace(WORKER, silence="dead")) == "worker (10.0.0.6): 2 CPUs, does not answer"
    assert "8.0 GiB of memory and 50.0 GiB of disk free" in line_of(HEAD)


def test_a_digest_changes_with_names_sizes_and_contents_wherever_they_are_looked_at(tmp_path: Path) -> None:
    large = WHOLE_BYTES + 1
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "weights").write_bytes(bytes(large))
    seen = {digest_of(str(tmp_path))}
    assert seen == {digest_of(str(tmp_path))}
    for change in (0, (large - PIECE_BYTES) // (PIECES - 1), large - 1):
        data = bytearray(large)
        data[change] = 1
        (tmp_path / "weights").write_bytes(data)
        seen.add(digest_of(str(tmp_path)))
    (tmp_path / "config.json").rename(tmp_path / "config")
    seen.add(digest_of(str(tmp_path)))
    assert len(seen) == 5
    assert digest_of(str(tmp_path / "nowhere")) == ""


def test_versions_are_of_what_decides_a_text_and_of_our_own_files() -> None:
    found = dict(versions())
    assert {"python", "ray", "torch", "serve_app", "serve_app's files"} <= set(found)
    assert len(found["serve_app's files"]) == 12
