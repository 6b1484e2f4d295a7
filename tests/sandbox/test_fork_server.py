"""Children of a sandbox: each by itself, ended by its bounds; a lost process is started again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.sandbox.fork_server import SLOW_NICENESS, ForkServer
from tests.sandbox.shouting import prepare


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer(prepare, "!", doing="shouts")
    yield server
    server.close()
    assert server._process is None


def asked(server: ForkServer, text: str, *, slow_after_s: float = 10) -> tuple[int, str, bool]:
    """Which child answered, what, and whether it was lowered in priority."""
    child = server.open()
    with child.connection:
        assert child.take(text.encode())
        answer = child.answer(slow_after_s=slow_after_s, wall_s=10)
        return child.process_id, answer["answer"], child.is_slow


def test_each_piece_of_work_has_a_child_of_its_own(server: ForkServer) -> None:
    first, second = asked(server, "a"), asked(server, "b")
    assert (first[1:], second[1:]) == (("A!", False), ("B!", False))
    assert first[0] != second[0]


@pytest.mark.parametrize("text", ["loop", "grow"])
def test_a_child_ends_with_its_bounds_and_the_next_one_does_not(server: ForkServer, text: str) -> None:
    with pytest.raises(EOFError):
        asked(server, text)
    assert asked(server, "a")[1] == "A!"


def test_what_takes_longer_than_a_moment_gives_way(server: ForkServer) -> None:
    assert asked(server, "wait", slow_after_s=0)[1:] == (f"{SLOW_NICENESS}!", True)
    assert asked(server, "wait")[1:] == ("0!", False)


def test_a_process_that_was_lost_is_begun_again(server: ForkServer) -> None:
    asked(server, "a")
    lost = server._process
    assert lost is not None
    lost.kill()
    lost.wait()
    assert asked(server, "b")[1] == "B!"
    assert server._process is not lost


def test_what_lies_in_the_working_directory_is_not_taken_for_a_library(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "socket.py").write_text("raise SystemExit('nor this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as Ray has it
    assert asked(server, "a")[1] == "A!"
