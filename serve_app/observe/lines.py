"""The form of a line in the log: text or JSON, with its time and the requests that it is about."""

from __future__ import annotations

import json
import logging
import os
import re
import traceback
from collections.abc import Callable
from datetime import UTC, datetime

from serve_app.core.errors import ServeError
from serve_app.core.log_context import REQUEST_IDS

VARIABLE = "SERVE_APP_LOG_MESSAGES"
"""Set to 1, messages of all errors are logged; some hold what a client sent."""
WITHHELD = f"(message withheld: it may hold what a client sent; {VARIABLE}=1 shows it)"
OURS, TORCHS = "serve_app.", "torch"
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
MARGIN = "  | "


class Lines(logging.Formatter):
    """Formats a line of the log, guarded as `GuardedFormatter` does, with its time in UTC and its requests.

    Text and JSON have time, level, logger and message; `request_id`, or `request_ids` where there are several; and the
    traceback, if there is one.

    speaks_json: asked for every line, as Serve may be told otherwise while it runs
    """

    def __init__(self, speaks_json: Callable[[], bool]) -> None:
        super().__init__()
        self._speaks_json = speaks_json

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, object] = {
            "time": _time_of(record),
            "level": record.levelname,
            "logger": record.name,
            "message": message_of(record),
            **_requests_of(record),
        }
        stack = stack_of(record.exc_info[1] if record.exc_info else None)
        if self._speaks_json():
            return json.dumps(facts | ({"error": "\n".join(stack)} if stack else {}))
        return escaped(_as_text(facts)) + "".join(f"\n{MARGIN}{escaped(each)}" for each in stack)


def _requests_of(record: logging.LogRecord) -> dict[str, object]:
    """Return the requests that the line itself is about, else those that the work at hand is for."""
    request_ids = getattr(record, "request_ids", ()) or REQUEST_IDS.get()
    if not request_ids:
        return {}
    return {"request_id": request_ids[0]} if len(request_ids) == 1 else {"request_ids": list(request_ids)}


def _as_text(facts: dict[str, object]) -> str:
    text = f"{facts['time']} {facts['level']} {facts['logger']}: {facts['message']}"
    for name in ("request_id", "request_ids"):
        if name in facts:
            found = facts[name]
            text += f" {name}={','.join(found) if isinstance(found, list) else found}"
    return text


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class GuardedFormatter(logging.Formatter):
    """One line per record, whatever is in it, so that none passes for another; the lines of a stack have a margin.

    An error is told by its kind and where it arose. Its message stays out unless it is one of the machine: what a
    library says of a text often quotes the text.
    """

    def format(self, record: logging.LogRecord) -> str:
        guarded = logging.makeLogRecord(record.__dict__)
        guarded.msg, guarded.args = escaped(message_of(record)), None
        guarded.exc_info = guarded.exc_text = None
        stack = stack_of(record.exc_info[1] if record.exc_info else None)
        return super().format(guarded) + "".join(f"\n{MARGIN}{escaped(each)}" for each in stack)


def message_of(record: logging.LogRecord) -> str:
    """Return the message; errors in it are told by their kinds."""
    guarded = logging.makeLogRecord(record.__dict__)
    if isinstance(record.args, tuple):
        guarded.args = tuple(told(each) if isinstance(each, BaseException) else each for each in record.args)
    return guarded.getMessage()


def stack_of(error: BaseException | None) -> list[str]:
    """Return the lines of the stack of an error and of those that led to it, the first first."""
    return [line for each in _chain(error) for line in _frames_of(each)]


def told(error: BaseException) -> str:
    """Return an error's kind, with its message where that is the machine's."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    shown = str(error) if _is_of_the_machine(error) or os.environ.get(VARIABLE) == "1" else WITHHELD
    return f"{name}: {shown}" if shown else name


def escaped(text: str) -> str:
    """Return the text without a character that ends a line or steers a terminal."""
    return CONTROLS.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def _is_of_the_machine(error: BaseException) -> bool:
    """Return whether nothing of a request gets into its message, as it may into what a client is told."""
    module = type(error).__module__
    if isinstance(error, ServeError):
        return False
    return isinstance(error, OSError | MemoryError) or module.startswith(OURS) or module.split(".")[0] == TORCHS


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found[::-1]


def _frames_of(error: BaseException) -> list[str]:
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
    return [*(line for frame in frames for line in frame.splitlines()), told(error)]
