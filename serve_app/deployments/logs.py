"""Where the log lines of a replica go."""

from __future__ import annotations

import logging
import sys

ACCESS_LOGGER = "serve_app.http.completions"


def log_as_configured() -> None:
    """Send the service's own lines to stderr, which Ray keeps per process: one bare JSON line per request, and
    everything else with its time and origin. Serve's own logging is set in the cluster file. Safe to repeat.
    """
    _attach("serve_app", logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _attach(ACCESS_LOGGER, logging.Formatter("%(message)s"))


def _attach(name: str, formatter: logging.Formatter) -> None:
    logger = logging.getLogger(name)
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
