"""Lines of the log say when, where and which requests they are about, as text and as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
import subprocess
import sys
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
from ray._common.formatters import JSONFormatter

from serve_app.core.log_context import MAX_NAMED, about, log_context
from serve_app.deployments.logs import SERVES_LOGGER, serve_writes_json
from serve_app.observe.lines import WITHHELD, Lines


def line(*, as_json: bool, error: bool = False, **extra: object) -> str:
    """One line about something."""
    try:
        if error:
            raise ValueError("of two lines\nat least")
    except ValueError:
        pass
    record = logging.getLogger("serve_app.somewhere").makeRecord(
        "serve_app.somewhere", logging.WARNING, __file__, 1, "replica %s is “gone”", ("r0",),
        sys.exc_info() if error else None, extra=extra,
    )  # fmt: skip
    return Lines(lambda: as_json).format(record)


def failing_line(*, as_json: bool) -> str:
    try:
        raise ValueError("of two lines\nat least")
    except ValueError:
        record = logging.LogRecord("serve_app.x", logging.ERROR, __file__, 1, "failed", None, sys.exc_info())
    return Lines(lambda: as_json).format(record)


def test_a_line_of_text_begins_with_its_time_in_utc_and_ends_with_its_request() -> None:
    with log_context(["abc-1"]):
        time, rest = line(as_json=False).split(" ", 1)
    assert len(time) == len("2026-01-01T00:00:00.000Z")
    assert time.endswith("Z")
    assert rest == "WARNING serve_app.somewhere: replica r0 is “gone” request_id=abc-1"


def test_a_line_in_json_is_one_object_on_one_line_with_its_traceback() -> None:
    with log_context(["abc-1"]):
        found = json.loads(failing_line(as_json=True))
    assert "\n" not in failing_line(as_json=True)
    assert set(found) == {"time", "level", "logger", "message", "request_id", "error"}
    assert (found["level"], found["request_id"]) == ("ERROR", "abc-1")
    assert found["error"].endswith(f"ValueError: {WITHHELD}")
    assert "ValueError" in failing_line(as_json=False)


@pytest.mark.parametrize("as_json", [True, False])
def test_no_character_of_a_line_ends_it_or_steers_a_terminal(as_json: bool) -> None:
    steering = "\x1b[2J\x9b31m\x85\u2028\u2029\n\r"
    record = logging.LogRecord("serve_app.x", logging.ERROR, __file__, 1, "%s\ud800", (steering,), None)
    written = Lines(lambda: as_json).format(record)
    assert not set(steering) - set("[2J31m") & set(written)
    if as_json:
        assert json.loads(written)["message"] == steering + "\ud800"
        written.encode()


def test_what_a_line_says_of_itself_goes_before_its_surroundings_and_is_bounded() -> None:
    with log_context(["outer"]):
        assert json.loads(line(as_json=True, **about(["a", "b", "a", ""])))["request_ids"] == ["a", "b"]
        assert json.loads(line(as_json=True, **about([])))["request_id"] == "outer"
    many = about(str(number) for number in range(1000))
    assert len(many["request_ids"]) == MAX_NAMED
    assert "request_id" not in line(as_json=True)
    assert line(as_json=False, **about(["a", "b"])).endswith(" request_ids=a,b")


async def test_requests_at_once_do_not_get_each_others_lines() -> None:
    async def served(name: str) -> str:
        with log_context([name]):
            await asyncio.sleep(0)
            return await asyncio.to_thread(line, as_json=True)

    lines = await asyncio.gather(*(served(f"r{number}") for number in range(8)))
    assert [json.loads(each)["request_id"] for each in lines] == [f"r{number}" for number in range(8)]


def test_lines_are_json_where_serve_was_told_to_write_that(tmp_path: Path) -> None:
    """As Serve sets its logger up: a buffer before a file."""
    logger = logging.getLogger(SERVES_LOGGER)
    target = logging.FileHandler(tmp_path / "serve.log")
    buffer = MemoryHandler(1, target=target)
    logger.addHandler(buffer)
    try:
        assert not serve_writes_json()
        target.setFormatter(JSONFormatter())
        assert serve_writes_json()
    finally:
        logger.removeHandler(buffer)
        buffer.close()
        target.close()


@pytest.mark.parametrize("as_json", [True, False])
def test_the_form_is_asked_for_line_by_line(as_json: bool) -> None:
    said = [as_json, not as_json]
    lines = Lines(said.pop)
    record = logging.LogRecord("serve_app.x", logging.INFO, __file__, 1, "hello", None, None)
    assert {lines.format(record).startswith("{"), lines.format(record).startswith("{")} == {True, False}


@pytest.mark.parametrize("mode", [0o644, 0o666, 0o600])
def test_a_file_that_takes_lines_is_its_owners_alone_from_then_on(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "worker.err"
    file.touch()
    file.chmod(mode)
    code = "from serve_app.deployments.logs import log_as_configured; log_as_configured()"
    with file.open("ab") as stderr:
        subprocess.run([sys.executable, "-c", code], stderr=stderr, check=True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
