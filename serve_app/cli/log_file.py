"""The file that takes what the processes of a cluster say, and the lines of it that tell why something failed."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from logging import LogRecord, makeLogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path

from serve_app.cli.address import Address
from serve_app.cli.screen import CommandFailed

HERE = "-"
STATE_VARIABLE = "XDG_STATE_HOME"
ONLY_OURS = 0o700
MAX_READ = 262_144
"""Bytes from the end of a log that are looked at."""
MAX_BYTES = 256 * 2**20
MAX_TOLD = 8
"""Lines."""
MAX_CHARS = 400
"""Of a line that is told."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
ORIGIN = re.compile(r"^\((?:[\w:.-]+ )?pid=\d+[^)]*\) ?")
FAILURE = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?(?:[A-Z]\w*)?(?:Error|Exception|Refused|Failed|NotSupported|Unusable)\b(?:\(.*?\))?: \S"
    r"|\b(?:out of memory|OutOfMemory|Address already in use|No space left on device)\b"
)


def log_path(address: Address, wanted: str | None = None) -> Path | None:
    """Make the log ready, the file that was asked for or the port's own; None where lines are to be shown here.

    An earlier run's file is kept beside it, with `.1` behind its name. Raises CommandFailed where it can be no file.
    """
    if wanted == HERE:
        return None
    path = _folder() / f"up-{address.port}.log" if wanted is None else Path(wanted).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_size:
            path.replace(path.with_name(path.name + ".1"))
    except OSError as error:
        raise _unwritable(path, error) from error
    opened(path).close()
    return path


class LogFile(RotatingFileHandler):
    """A file of its owner alone that grows to `MAX_BYTES`; what was before it is kept once, with `.1` behind its name.

    What a full disk does not take is left out, and the file is opened anew for what comes next.
    """

    terminator = ""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")

    def take(self, descriptor: int) -> None:
        """Write down everything that comes through a pipe until its other end is closed, and close the file."""
        with os.fdopen(descriptor, "rb") as lines:
            for line in lines:
                self.emit(makeLogRecord({"msg": line.decode("utf-8", "replace")}))
        self.close()

    def handleError(self, record: LogRecord) -> None:
        """Let the next line find out whether there is room again."""
        stream, self.stream = self.stream, None  # logging opens it when it is None
        with suppress(OSError):
            if stream is not None:
                stream.close()

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=partial(os.open, mode=0o600))


def opened(path: Path) -> LogFile:
    """Return the file, which takes lines from now on. Raises CommandFailed."""
    try:
        return LogFile(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> CommandFailed:
    return CommandFailed(f"{path} cannot take the log: {error.strerror}. Name another file with --log; - is here.")


def told_by(path: Path | None, messages: Iterable[str] = ()) -> list[str]:
    """Return the lines that say why something failed, of messages and of the end of a log."""
    text = "\n".join(messages)
    return telling(text) or telling(_end_of(path)) or last_lines(_end_of(path))


def telling(text: str) -> list[str]:
    """Return the last lines that name an error, each once, without colours and names of processes."""
    found = [line for line in map(_bare, text.splitlines()) if FAILURE.search(line)]
    return [line[:MAX_CHARS] for line in dict.fromkeys(found)][-MAX_TOLD:]


def last_lines(text: str) -> list[str]:
    """Return the end of a text that names no error."""
    return [line[:MAX_CHARS] for line in map(_bare, text.splitlines()) if line][-MAX_TOLD:]


def _bare(line: str) -> str:
    return ORIGIN.sub("", COLOURS.sub("", line)).strip()


def _end_of(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_READ))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _folder() -> Path:
    """Return this user's folder for the state of programs, or a temporary one where that cannot be made."""
    state = os.environ.get(STATE_VARIABLE)
    folder = (Path(state) if state else Path.home() / ".local" / "state") / "serve_app"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=ONLY_OURS)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="serve_app-"))
    return folder
