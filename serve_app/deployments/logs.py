"""Where the log lines of a replica go, and what is kept out of them."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from types import TracebackType

from serve_app.core.errors import ServeError

ACCESS_LOGGER = "serve_app.http.completions"
VARIABLE = "SERVE_APP_LOG_MESSAGES"
"""Set to 1, messages of all errors are logged; some hold what a client sent."""
WITHHELD = f"(message withheld: it may hold what a client sent; {VARIABLE}=1 shows it)"
OURS, TORCHS = "serve_app.", "torch"
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
MARGIN = "  | "

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def log_as_configured() -> None:
    """Send the service's own lines to stderr, which Ray keeps per process: one bare JSON line per request, and
    everything else with its time and origin. Serve's own logging is set in the cluster file. Safe to repeat.
    """
    _attach("serve_app", GuardedFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _attach(ACCESS_LOGGER, GuardedFormatter("%(message)s"))


class GuardedFormatter(logging.Formatter):
    """One line per record, whatever is in it, so that none passes for another; the lines of a stack have a margin.

    An error is told by its kind and where it arose. Its message stays out unless it is one of the machine: what a
    library says of a text often quotes the text.
    """

    def format(self, record: logging.LogRecord) -> str:
        guarded = logging.makeLogRecord(record.__dict__)
        guarded.exc_text = None
        if isinstance(record.args, tuple):
            guarded.args = tuple(told(each) if isinstance(each, BaseException) else each for each in record.args)
        guarded.msg, guarded.args = CONTROLS.sub(_escaped, guarded.getMessage()), None
        return super().format(guarded)

    def formatException(self, ei: ExceptionInfo) -> str:
        """The stack of the error and of those that led to it, the first first."""
        lines = [line for error in _chain(ei[1]) for line in _stack_of(error)]
        return "\n".join(MARGIN + CONTROLS.sub(_escaped, line) for line in lines)


def told(error: BaseException) -> str:
    """Its kind, with its message where that is the machine's."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    shown = str(error) if _is_of_the_machine(error) or os.environ.get(VARIABLE) == "1" else WITHHELD
    return f"{name}: {shown}" if shown else name


def _is_of_the_machine(error: BaseException) -> bool:
    """Whether nothing of a request gets into its message, as it may into what a client is told."""
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


def _stack_of(error: BaseException) -> list[str]:
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
    return [*(line for frame in frames for line in frame.splitlines()), told(error)]


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode("ascii")


def _attach(name: str, formatter: logging.Formatter) -> None:
    logger = logging.getLogger(name)
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
