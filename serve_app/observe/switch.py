"""Whether requests are traced, and where to: settings, else the OTEL_* environment, else not at all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve_app.observe.tracing import Tracing

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
WANTED = "`tracing` needs a package that is not there: .venv/bin/pip install -c constraints.txt -e '.[tracing]'"


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Where traces go, and how many of them.

    endpoint: of an OTLP receiver over HTTP; None is what the environment says
    sample: share of the traces that begin here which are kept; None is what the environment says
    """

    endpoint: str | None = None
    sample: float | None = None


class Switch:
    """Owns what is on now."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._settings: TraceSettings | None = None
        self._trace: Tracing | None = None

    def turned(self, settings: TraceSettings | None) -> Tracing | None:
        """Return what traces as these settings say; the same as before where they say the same.

        Raises ValueError where they want tracing and the package for that is not there. Where the environment alone
        wants it, which may be meant for others, that is only logged.
        """
        found = wanted(settings, self._environ)
        if found != self._settings:
            made = None if found is None else _made(found, must=settings is not None)
            if self._trace is not None:  # what it has left is sent beside whatever comes
                Thread(target=self._trace.close, name="traces", daemon=True).start()
            self._settings, self._trace = found, made
        return self._trace

    def close(self) -> None:
        """Send what is left; blocks for a few seconds at most."""
        if self._trace is not None:
            self._trace.close()
        self._settings = self._trace = None


def _made(settings: TraceSettings, *, must: bool) -> Tracing | None:
    try:
        from serve_app.observe.tracing import tracing  # imported here: who does not trace pays nothing
    except ImportError as error:
        if must:
            raise ValueError(WANTED) from error
        logger.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, and nothing is traced: %s", WANTED)
        return None
    return tracing(settings.endpoint, settings.sample)


def wanted(settings: TraceSettings | None, environ: Mapping[str, str]) -> TraceSettings | None:
    """Return what the settings say, else the environment; None where nothing is to be traced."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if settings is not None:
        return settings
    is_otlp = environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"
    return TraceSettings() if is_otlp and any(environ.get(name) for name in ENDPOINTS) else None
