"""`serve_app up` says who is in its way, and `serve_app down` ends what an earlier one left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.cli import main
from serve_app.cli.address import Address, address_of
from serve_app.cli.screen import Exit
from serve_app.cli.startup import Events, JsonTelling
from serve_app.cli.up import Cluster, _serve
from tests.cli.runs import end, needs_proc, new_run, start
from tests.ports import held_port

LISTEN = """
import socket
listener = socket.create_server(("127.0.0.1", {port}))
"""


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


@pytest.fixture
def file(tmp_path: Path, port: int) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        f"http_options: {{host: 127.0.0.1, port: {port}}}\n"
        "applications:\n- name: router\n  import_path: serve_app.deployments.apps:router\n  args: {}\n"
    )
    return str(path)


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ("{}", "http://127.0.0.1:8000"),
        ("{host: 0.0.0.0, port: 80}", "http://127.0.0.1:80"),
        ("{host: '::'}", "http://[::1]:8000"),
        ("{host: '2001:db8::1', port: 9000}", "http://[2001:db8::1]:9000"),
        ("{host: localhost}", "http://localhost:8000"),
        ("[not, a, mapping", "http://127.0.0.1:8000"),
        ("{port: many}", "http://127.0.0.1:8000"),
        ("{port: '81'}", "http://127.0.0.1:81"),
        ("3", "http://127.0.0.1:8000"),
    ],
)
def test_the_address_is_one_that_can_be_opened_from_here(tmp_path: Path, options: str, url: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"http_options: {options}\n")
    assert str(address_of(str(file))) == url


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_an_address_is_taken_while_something_listens(family: socket.AddressFamily, host: str) -> None:
    with socket.create_server((host, 0), family=family) as listener:
        address = Address(host=host, port=int(listener.getsockname()[1]))
        assert address.is_taken()
    assert not address.is_taken()


def test_up_tells_where_its_log_cannot_be(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for log in (tmp_path, Path(file) / "up.log", Path("/proc/none/up.log")):
        assert main(["up", file, "--log", str(log)]) == Exit.FAILED
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"serve_app: {log} cannot take the log: ")
        assert line.endswith("Name another file with --log; - is here.")


def test_up_answers_a_program_with_what_check_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--json", "missing.yaml"]) == Exit.FAILED
    told = json.loads(capsys.readouterr().out)
    assert main(["check", "--json", "missing.yaml"]) == Exit.FAILED
    assert json.loads(capsys.readouterr().out) == told
    assert (told["file"], told["is_sound"]) == ("missing.yaml", False)
    assert told["lines"]


@needs_proc
def test_up_names_the_process_that_holds_its_port(file: str, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", port)):
        assert main(["up", file]) == 1
        assert main(["down", file]) == 1, "it is not ours to end"
        assert main(["check", file]) == 0
    told = capsys.readouterr()
    (noted,) = (line for line in told.out.splitlines() if "note: http_options.port" in line)
    said = told.err.splitlines()
    assert len(said) == 2
    for line in (*said, noted):
        assert f"pid {os.getpid()} (" in line
        assert f"listens on http://127.0.0.1:{port} already; end it, or serve on another port:" in line
        assert f"`serve_app up {file} --port N`" in line


@needs_proc
def test_down_ends_what_an_earlier_up_of_the_file_left_and_nothing_else(
    file: str, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    left, other = start(new_run(port, file), LISTEN.format(port=port)), start(new_run(port, f"{file}.other"), "")
    elsewhere = start(new_run(port * 10, file), "")
    try:
        assert main(["up", file]) == 1
        assert f"pid {left.pid} (" in (said := capsys.readouterr().err)
        assert f"a run of {file}" in said
        assert f"`serve_app down {file}` ends it" in said
        assert main(["check", file]) == 0
        assert f"note: http_options.port: pid {left.pid} (" in capsys.readouterr().out
        assert main(["down", file, "--port", str(port)]) == 0
        assert left.wait(60) != 0
        assert elsewhere.poll() is None
        assert main(["down", file]) == 0
        assert elsewhere.wait(60) != 0
        assert other.poll() is None
        capsys.readouterr()
        assert main(["down", file]) == 0
        assert f"Nothing of `serve_app up {file}` is left" in capsys.readouterr().out
    finally:
        for each in (left, other, elsewhere):
            end(each)


@needs_proc
@pytest.mark.parametrize("ours", [False, True], ids=["another file's", "its own"])
@pytest.mark.parametrize(
    "content", [None, "", "[not, a, mapping", "{}", "applications: 3", "applications:\n  - a: [", "\0"]
)
def test_down_of_what_is_no_cluster_file_ends_nothing(
    port: int, tmp_path: Path, ours: bool, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.yaml"
    if content is not None:
        wrong.write_text(content)
    runs = start(new_run(port, str(wrong if ours else tmp_path / "cluster.yaml")), LISTEN.format(port=port))
    try:
        assert main(["down", str(wrong)]) == 1
        assert f"{wrong} is no cluster file that can be read, so nothing was ended" in capsys.readouterr().err
        assert runs.poll() is None
    finally:
        end(runs)


SERVING = """
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
told = {"router": {"status": "DEPLOY_FAILED", "message": "no", "running": 0, "deployments": {}}}
try:
    os.write(int(sys.argv[1]), json.dumps(told).encode() + b"\\n")
    time.sleep(600)
except KeyboardInterrupt:
    pathlib.Path(sys.argv[2]).write_text("shut down")
"""


def test_what_cannot_be_served_in_a_cluster_of_others_is_shut_down_there_and_not_killed(
    file: str, tmp_path: Path
) -> None:
    ours, theirs = os.pipe()
    words = [sys.executable, "-c", SERVING, str(theirs), str(tmp_path / "said")]
    process = subprocess.Popen(words, pass_fds=[theirs])
    os.close(theirs)
    cluster = Cluster(process=process, run="", address=address_of(file), events=Events(ours), log=None, has_core=False)
    assert _serve(cluster, Path(file), JsonTelling()) == Exit.FAILED
    assert (tmp_path / "said").read_text() == "shut down"


@needs_proc
def test_a_run_of_another_file_or_checkout_is_named_and_left_alone(
    file: str, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for origin in (f"{tmp_path}/other.yaml of /a/checkout", f"{file} of /another/checkout"):
        runs = start(f"{port}-test {origin}", LISTEN.format(port=port))
        try:
            for command in ("up", "down"):
                assert main([command, file]) == 1
                assert f", a run of {origin}, listens on" in capsys.readouterr().err
            assert runs.poll() is None
        finally:
            end(runs)
