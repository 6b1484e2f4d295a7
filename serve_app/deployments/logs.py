"""Where the log lines of a replica go, and what is kept out of them."""

from __future__ import annotations

import logging
import os
import stat
import sys
from contextlib import suppress
from logging.handlers import MemoryHandler

from serve_app.observe.lines import GuardedFormatter, Lines

ACCESS_LOGGER = "serve_app.http.completions"
SERVES_LOGGER = "ray.serve"
SERVES_JSON = "JSONFormatter"


def log_as_configured() -> None:
    """Send the service's own log lines to stderr, which Ray keeps per process.

    One bare JSON line is written per request. All other lines have time, level, origin and requests. They are JSON if
    `logging_config` of the cluster file has Serve write that (`encoding: JSON`). A file that takes the lines is
    readable by its owner alone from then on, because lines may contain texts. Safe to repeat.
    """
    with suppress(OSError, ValueError):  # a stderr that is no file has nothing to be opened
        found = os.fstat(sys.stderr.fileno()).st_mode
        if stat.S_ISREG(found):
            os.fchmod(sys.stderr.fileno(), stat.S_IMODE(found) & stat.S_IRWXU)
    _attach("serve_app", Lines(serve_writes_json))
    _attach(ACCESS_LOGGER, GuardedFormatter("%(message)s"))


def serve_writes_json() -> bool:
    """Return whether Serve writes JSON in this process, as its logger alone shows."""
    for handler in logging.getLogger(SERVES_LOGGER).handlers:
        writing = handler.target if isinstance(handler, MemoryHandler) else handler
        if type(getattr(writing, "formatter", None)).__name__ == SERVES_JSON:
            return True
    return False


def _attach(name: str, formatter: logging.Formatter) -> None:
    logger = logging.getLogger(name)
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
