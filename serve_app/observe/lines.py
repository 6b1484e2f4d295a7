"""The form of a line in the log: text or JSON, with its time and the requests that it is about."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from serve_app.core.log_context import REQUEST_IDS
from serve_app.observe.guard import MARGIN, escaped, message_of, stack_of


class Lines(logging.Formatter):
    """Both have time in UTC, level, logger and message; `request_id`, or `request_ids` where there are several; and the
    traceback, if there is one. Guarded, as `guard` says.

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
    """Those that the line itself is about, else those that the work at hand is for."""
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
